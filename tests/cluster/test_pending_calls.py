"""The deadlines of a cluster's calls: one timer for all, and each call ends as with a timer of its own."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.cluster.errors import CallTimedOut
from roll.cluster.pending_calls import PendingCalls
from roll.simulation.clock import Deadlock, run

CALLS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)
"""When a call is made, and how long it takes."""


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(calls=CALLS, deadline=st.integers(1, 20))
def test_every_call_ends_as_with_a_timer_of_its_own(calls: list[tuple[int, int]], deadline: int) -> None:
    pending = PendingCalls(float(deadline) + 0.5)

    async def call(start: int, takes: int) -> tuple[float, bool]:
        await asyncio.sleep(start)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            await pending.run("worker[0]", "method", asyncio.sleep(takes))
        except CallTimedOut:
            return loop.time() - began_s, False
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()
        return loop.time() - began_s, True

    async def main() -> list[tuple[float, bool]]:
        results = await asyncio.gather(*(call(*each) for each in calls))
        assert list(pending) == []
        return results

    for (_, takes), (seconds, finished) in zip(calls, run(main()), strict=True):
        assert finished == (takes <= deadline)
        assert seconds == pytest.approx(takes if finished else deadline + 0.5)


def test_a_call_that_someone_else_cancels_is_cancelled() -> None:
    async def main() -> None:
        pending = PendingCalls(5.0)
        task = asyncio.create_task(pending.run("worker[0]", "method", asyncio.sleep(9)))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())


def test_a_call_that_does_not_let_itself_be_cancelled_returns_its_result() -> None:
    async def stubborn() -> str:
        try:
            await asyncio.sleep(9)
        except asyncio.CancelledError:
            return "done"
        return "late"

    async def main() -> None:
        assert await PendingCalls(5.0).run("worker[0]", "method", stubborn()) == "done"
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()

    run(main())


def test_no_timer_outlives_the_calls() -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        pending = PendingCalls(1800.0)
        await asyncio.gather(*(pending.run("worker[0]", "method", asyncio.sleep(1)) for _ in range(3)))
        assert list(pending) == []
        await loops[0].create_future()

    with pytest.raises(Deadlock):
        run(main())
    assert loops[0].time() == 1.0
