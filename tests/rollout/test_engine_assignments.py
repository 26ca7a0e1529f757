"""EngineAssignments: a sample has one engine at a time, the last it was given, and waits while it has none."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from rollout_toys import go, turns

from roll.rollout.messages import EngineAssignment
from roll.rollout.runner import EngineAssignments


def test_an_assignment_that_was_made_before_is_there_and_stays() -> None:
    async def main() -> None:
        assignments = EngineAssignments()
        assert assignments.engine("a") is None
        assignments.assign(EngineAssignment("a", 3, 7))
        assert assignments.engine("a") == 3
        assert await assignments.wait_for("a", 1) == EngineAssignment("a", 3, 7)
        assert await assignments.wait_for("a", 1) == EngineAssignment("a", 3, 7)

    go(main())


def test_a_sample_without_an_assignment_waits_for_its_next_one() -> None:
    async def main() -> None:
        assignments = EngineAssignments()
        assignments.assign(EngineAssignment("a", 0))
        assignments.remove("a")
        assignments.remove("never had one")
        waiting = asyncio.create_task(assignments.wait_for("a", 10))
        await turns()
        assert not waiting.done()
        assignments.assign(EngineAssignment("b", 5))
        await turns()
        assert not waiting.done()
        assignments.assign(EngineAssignment("a", 1))
        assert (await waiting).engine == 1
        assert assignments.engine("a") == 1

    go(main())


def test_a_wait_for_an_assignment_ends_at_its_deadline() -> None:
    async def main() -> None:
        assignments = EngineAssignments()
        began = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError):
            await assignments.wait_for("a", 5)
        assert asyncio.get_running_loop().time() - began == pytest.approx(5)
        assignments.assign(EngineAssignment("a", 2))  # too late for that one, not for the next
        assert (await assignments.wait_for("a", 5)).engine == 2

    go(main())


@pytest.mark.parametrize("given_too", [False, True])
def test_one_that_is_cancelled_while_it_waits_leaves_nothing_behind(given_too: bool) -> None:
    async def main() -> None:
        assignments = EngineAssignments()
        waiting = asyncio.create_task(assignments.wait_for("a", 10))
        await turns()
        if given_too:
            assignments.assign(EngineAssignment("a", 1))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not assignments._waiters
        assignments.assign(EngineAssignment("a", 4))
        assert (await assignments.wait_for("a", 10)).engine == 4

    go(main())


@given(steps=st.lists(st.tuples(st.sampled_from(["give", "lose", "wait", "turn"]), st.integers(0, 1)), max_size=30))
@settings(max_examples=examples(200), derandomize=True, deadline=None)
def test_a_sample_has_its_latest_assignment(steps: list[tuple[str, int]]) -> None:
    async def main() -> None:
        assignments = EngineAssignments()
        last: dict[str, int | None] = {"s0": None, "s1": None}
        waiting: dict[str, asyncio.Task[EngineAssignment]] = {}
        for number, (what, which) in enumerate(steps):
            sample = f"s{which}"
            if what == "give":
                assignments.assign(EngineAssignment(sample, number))
                last[sample] = number
            elif what == "lose" and sample not in waiting:
                assignments.remove(sample)
                last[sample] = None
            elif what == "wait" and sample not in waiting:
                waiting[sample] = asyncio.create_task(assignments.wait_for(sample, 1000))
            elif what == "turn":
                await turns()
                for name, engine in last.items():
                    task = waiting.pop(name, None) if engine is not None else None
                    assert assignments.engine(name) == engine
                    assert task is None or await task == EngineAssignment(name, engine or 0)
                assert not any(task.done() for task in waiting.values())
        for task in waiting.values():
            task.cancel()
        await asyncio.gather(*waiting.values(), return_exceptions=True)
        assert not assignments._waiters

    go(main())
