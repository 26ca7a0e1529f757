"""The pool of processes, with processes that are none: what it starts, replaces and ends, in any order of events."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.config.errors import RunError
from roll.process.pool import ProcessPool


class Process:
    """Ends some turns of the loop after it was killed."""

    def __init__(self, turns: int = 1) -> None:
        self.turns = turns
        self.kills = 0
        self.ended = False

    def kill(self) -> None:
        self.kills += 1

    async def wait_exit(self) -> None:
        assert self.kills, "nobody has killed it"
        for _ in range(self.turns):
            await asyncio.sleep(0)
        self.ended = True


class Owner:
    """What a user of the pool sees. `starts`: how each start ends, in order; those after the last succeed."""

    def __init__(self, size: int, starts: str = "") -> None:
        self.starts = list(starts)
        self.made: list[Process] = []
        self.ready: list[Process] = []
        self.errors: list[str] = []
        self.pool: ProcessPool[Process] = ProcessPool("toy", size, self.start, self.ready.append, self.on_end)

    async def start(self) -> Process:
        await asyncio.sleep(0)
        if self.starts and self.starts.pop(0) == "x":
            raise ChildProcessError("no more processes")
        self.made.append(Process())
        return self.made[-1]

    def on_end(self, error: RunError) -> None:
        self.errors.append(str(error))

    async def settle(self) -> None:
        while replacements := self.pool.replacements:
            await asyncio.wait(replacements)


def run(use: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await use()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_a_pool_that_was_not_started_refuses_calls() -> None:
    async def use() -> None:
        owner = Owner(2)
        with pytest.raises(RunError, match="the toy pool was not started"):
            owner.pool.raise_if_ended()
        await owner.pool.start()
        owner.pool.raise_if_ended()
        assert owner.ready == owner.made
        assert owner.pool.processes == set(owner.made)
        await owner.pool.close()

    run(use)


def test_a_start_that_fails_ends_the_processes_that_have_started() -> None:
    async def use() -> None:
        owner = Owner(3, "..x")
        with pytest.raises(ChildProcessError):
            await owner.pool.start()
        assert owner.pool.processes == frozenset()
        assert all(process.ended for process in owner.made)
        assert owner.pool.ended

    run(use)


def test_a_process_is_replaced_after_it_has_ended_also_if_a_start_fails() -> None:
    async def use() -> None:
        owner = Owner(1, ".xx.")
        await owner.pool.start()
        (first,) = owner.ready
        owner.pool.replace(first)
        assert first.kills == 1, "at once"
        assert not first.ended
        await owner.settle()
        assert first.ended
        assert len(owner.ready) == 2
        assert owner.pool.processes == {owner.ready[1]}
        assert (owner.pool.restarts, owner.errors) == (1, [])
        await owner.pool.close()

    run(use)


def test_a_pool_whose_processes_no_longer_start_ends_with_the_reason() -> None:
    async def use() -> None:
        owner = Owner(2, "..xxx")
        await owner.pool.start()
        owner.pool.replace(owner.ready[0])
        await owner.settle()
        reason = "no toy process starts any more (3 tries): no more processes"
        assert owner.errors == [reason]
        with pytest.raises(RunError, match="no toy process starts any more"):
            owner.pool.raise_if_ended()
        await owner.pool.close()
        assert set(owner.errors) == {reason}, "the first error stays"
        assert all(process.ended for process in owner.made)

    run(use)


def test_a_launched_process_is_the_callers_to_retire() -> None:
    async def use() -> None:
        owner = Owner(1)
        await owner.pool.start()

        async def slow() -> Process:
            return Process(turns=5)

        extra = await owner.pool.launch(slow)
        assert extra not in owner.ready
        assert extra in owner.pool.processes
        await owner.pool.retire(extra)
        assert extra.ended
        assert owner.pool.processes == set(owner.ready)
        await owner.pool.close()

    run(use)


@given(st.integers(1, 4), st.lists(st.sampled_from(["replace", "turn", "launch", "end"]), max_size=20), st.integers(0))
def test_whatever_happens_the_pool_is_whole_or_ended_and_leaves_nothing(size: int, events: list[str], seed: int) -> None:
    async def use() -> None:
        rng = random.Random(seed)
        owner = Owner(size, "." * size + "".join(rng.choice("...x") for _ in range(12)))
        await owner.pool.start()
        free = list(owner.ready)
        for event in events:
            if event == "replace" and free:
                owner.pool.replace(free.pop(rng.randrange(len(free))))
            elif event == "turn":
                await asyncio.sleep(0)
            elif event == "launch":
                await asyncio.gather(owner.pool.launch(), return_exceptions=True)
            elif event == "end" and rng.random() < 0.2:
                owner.pool.end()
            free += [process for process in owner.ready if process not in free and not process.kills]
        await owner.settle()
        living = [process for process in owner.ready if not process.kills]
        assert owner.pool.ended or len(living) == size
        assert owner.pool.restarts <= len(owner.ready) - size
        await owner.pool.close()
        await owner.pool.close()
        assert owner.pool.processes == frozenset()
        assert all(process.ended for process in owner.made)
        assert owner.pool.ended

    run(use)
