"""No call waits for ever, and of several errors the one that came first is heard."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

import roll.cluster.cluster
from roll.cluster import Cluster, Dispatch, LocalExecutor, Worker, WorkerPlacement, dispatch
from roll.cluster.errors import CallFailure, CallTimedOut, WorkerDied, WorkerError, first_of
from roll.config.errors import RunError

T = TypeVar("T")


class Fellow(Worker):
    """Does what a test says: the coroutine function its rank is given."""

    def __init__(self, place: WorkerPlacement, acts: dict[int, Callable[[], Coroutine[Any, Any, Any]]]) -> None:
        super().__init__(place)
        self.acts = acts
        self.cancelled = False

    @dispatch(Dispatch.ALL)
    async def act(self) -> Any:
        try:
            return await self.acts[self.placement.rank]()
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    @dispatch(Dispatch.ONE)
    async def first(self) -> Any:
        return await self.act()


async def fellows(
    deadline_s: float, *acts: Callable[[], Coroutine[Any, Any, Any]]
) -> tuple[Cluster[Fellow], list[Fellow]]:
    made: list[Fellow] = []

    def make(place: WorkerPlacement) -> Fellow:
        made.append(Fellow(place, dict(enumerate(acts))))
        return made[-1]

    places = [WorkerPlacement("fellow", rank, len(acts)) for rank in range(len(acts))]
    return await Cluster.start(LocalExecutor(deadline_s), make, places), made


async def forever() -> None:
    await asyncio.Event().wait()


def says(value: Any, turns: int = 0) -> Callable[[], Coroutine[Any, Any, Any]]:
    """Returns the value, or raises it if it is an error, after some turns."""

    async def act() -> Any:
        for _ in range(turns):
            await asyncio.sleep(0)
        if isinstance(value, BaseException):
            raise value
        return value

    return act


def worker_error(at_s: float, text: str = "boom") -> WorkerError:
    return WorkerError(CallFailure("fellow[0]", "act", "process 1 on here", (text,), "trace", at_s))


@pytest.mark.parametrize("how", ["call", "call_rank", "call_each", "one"])
def test_a_worker_that_does_not_answer_is_named_with_its_method(how: str) -> None:
    async def main() -> None:
        cluster, (_, hung) = await fellows(0.02, says(1), forever)
        calls = {
            "call": (lambda: cluster.call(Fellow.act), "act"),
            "call_rank": (lambda: cluster.call_rank(1, Fellow.first), "first"),
            "call_each": (lambda: cluster.call_each(Fellow.act), "act"),
            "one": (lambda: cluster.call_rank(1, Fellow.act), "act"),
        }
        call, method = calls[how]
        with pytest.raises(CallTimedOut, match=rf"^fellow\[1\] has not answered {method} for 0\.02 s$") as caught:
            await call()
        assert isinstance(caught.value, RunError)
        assert (caught.value.worker, caught.value.__cause__) == ("fellow[1]", None)
        assert hung.cancelled

    asyncio.run(main())


def test_the_executors_deadline_is_the_clusters() -> None:
    async def main() -> None:
        cluster, _ = await fellows(7.5, says(1))
        assert cluster.deadline_s == 7.5
        assert LocalExecutor().deadline_s == Cluster("x", cluster._handles).deadline_s == 1800

    asyncio.run(main())


def test_a_methods_own_timeout_passes_as_it_is() -> None:
    async def own() -> None:
        async with asyncio.timeout(0.01):
            await forever()

    async def main() -> None:
        cluster, _ = await fellows(5, own)
        for call in (cluster.call(Fellow.act), cluster.call(Fellow.first)):
            with pytest.raises(TimeoutError) as caught:
                await call
            assert not isinstance(caught.value, RunError)
        other, _ = await fellows(5, says(TimeoutError("the grader slept")))
        with pytest.raises(TimeoutError, match="the grader slept"):
            await other.call(Fellow.act)

    asyncio.run(main())


def test_a_cancelled_call_is_cancelled_at_its_workers() -> None:
    async def main() -> None:
        cluster, made = await fellows(5, forever, forever)
        call = asyncio.create_task(cluster.call(Fellow.act))
        await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.sleep(0)
        assert all(fellow.cancelled for fellow in made)

    asyncio.run(main())


# the first of several errors


@pytest.mark.parametrize("order", [(30.0, 10.0, 20.0), (10.0, 20.0, 30.0), (30.0, 20.0, 10.0)])
def test_the_error_that_came_first_is_raised_not_the_one_heard_first(order: tuple[float, ...]) -> None:
    async def main() -> None:
        acts = [says(worker_error(at_s, f"at {at_s:g}"), turns=5 * rank) for rank, at_s in enumerate(order)]
        cluster, _ = await fellows(5, *acts)
        for call in (cluster.call(Fellow.act), cluster.call_each(Fellow.act)):
            with pytest.raises(WorkerError, match="at 10"):
                await call

    asyncio.run(main())


def test_a_dated_error_comes_before_one_that_is_not() -> None:
    late, plain, other = worker_error(99.0), KeyError("plain"), KeyError("other")
    assert first_of([plain, late, other]) is late
    assert first_of([plain, other]) is plain


def test_a_failure_is_heard_without_waiting_for_workers_that_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll.cluster.cluster, "_GRACE_S", 0.02)

    async def main() -> None:
        cluster, (_, hung, _) = await fellows(60, says(OSError("one died"), turns=3), forever, says(2))
        with pytest.raises(OSError, match="one died"):
            await asyncio.wait_for(cluster.call(Fellow.act), 5)
        await asyncio.sleep(0)
        assert hung.cancelled
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_others_are_heard_for_a_moment_after_the_first_failure() -> None:
    async def main() -> None:
        async def later() -> None:
            await asyncio.sleep(0.02)
            raise worker_error(1.0, "the first cause")

        cluster, _ = await fellows(60, says(worker_error(2.0, "lost my peer")), later)
        with pytest.raises(WorkerError, match="the first cause"):
            await cluster.call(Fellow.act)

    asyncio.run(main())


def test_errors_know_when_they_came() -> None:
    before = time.time()
    for error in (CallTimedOut("a[0]", "act", 1), WorkerDied("a[0]", "gone"), WorkerError(failure())):
        assert before <= error.at_s <= time.time()


def failure() -> CallFailure:
    return CallFailure.of(KeyError("x"), "a[0]", "act", "here")
