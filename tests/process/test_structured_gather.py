"""Several coroutines at once: results in order, and an end of all when one fails or the caller is cancelled."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any

import pytest

from roll.process.structured_gather import structured_gather


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def go(coroutine: Coroutine[Any, Any, None]) -> list[str]:
    """Runs a test's coroutine, holds that it leaves no task behind, and returns what the event loop complained about."""
    complaints: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
        await asyncio.wait_for(coroutine, 200)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    gc.collect()
    return complaints


class Work:
    """A coroutine that works for some turns, and cleans up for some when it is ended early."""

    def __init__(
        self, works: int, cleans: int = 0, fails: Exception | None = None, late: Exception | None = None
    ) -> None:
        self.works, self.cleans, self.fails, self.late = works, cleans, fails, late
        self.cancelled = 0
        self.cleaned = False

    async def __call__(self) -> int:
        try:
            await turns(self.works)
        except asyncio.CancelledError:
            self.cancelled += 1
            await self._clean()
            raise
        if self.fails is not None:
            raise self.fails
        return self.works

    async def _clean(self) -> None:
        try:
            await turns(self.cleans)
            self.cleaned = True
        except asyncio.CancelledError:
            self.cancelled += 1
        if self.late is not None:
            raise self.late


def test_results_are_in_order_whoever_is_first() -> None:
    async def main() -> None:
        assert await structured_gather(Work(count)() for count in (9, 2, 30, 0, 2)) == [9, 2, 30, 0, 2]
        assert await structured_gather([]) == []

    assert go(main()) == []


def test_they_run_side_by_side() -> None:
    async def main() -> None:
        meeting = asyncio.Barrier(3)
        assert sorted(await structured_gather(meeting.wait() for _ in range(3))) == [0, 1, 2]

    go(main())


def test_the_first_error_is_raised_after_the_others_have_cleaned_up() -> None:
    others = [Work(1000, cleans=count) for count in (0, 3, 40)]
    never_started = Work(1000)
    failing = [Work(5, fails=KeyError("first")), Work(1000, cleans=2, late=ValueError("on the way out"))]

    async def main() -> None:
        with pytest.raises(KeyError, match="first"):
            await structured_gather(work() for work in (Work(1), others[0], *failing, *others[1:]))
        with pytest.raises(KeyError, match="at once"):
            await structured_gather(work() for work in (Work(0, fails=KeyError("at once")), never_started))

    assert go(main()) == []
    assert all(work.cleaned and work.cancelled == 1 for work in others)


def test_one_that_was_cancelled_by_somebody_else_ends_the_others_too() -> None:
    other = Work(1000, cleans=5)

    async def cancels_itself() -> int:
        await turns(3)
        raise asyncio.CancelledError

    async def main() -> None:
        with pytest.raises(asyncio.CancelledError):
            await structured_gather([other(), cancels_itself()])

    assert go(main()) == []
    assert other.cleaned


@pytest.mark.parametrize("after", [0, 1, 2, 20])
@pytest.mark.parametrize("again", [None, 0, 1, 2, 3, 4, 10])
def test_when_the_caller_is_cancelled_all_are_cancelled_once_and_clean_up_in_peace(after: int, again: int | None) -> None:
    works = [Work(5), *(Work(1000, cleans=count) for count in range(0, 40, 5)), Work(1000, 3, late=ValueError("late"))]

    async def main() -> None:
        call = asyncio.create_task(structured_gather(work() for work in works))
        await turns(after)
        for wait in (0, *(() if again is None else (again, again))):
            await turns(wait)
            call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        running = [work for work in works if work.cancelled]
        assert len(running) >= (len(works) - 1 if after > 1 else 0)
        assert all(work.cancelled == 1 for work in running)
        assert all(work.cleaned for work in running)

    assert go(main()) == []


def test_a_caller_cancelled_during_the_cleanup_after_an_error_hears_of_it_when_that_is_done() -> None:
    failing, other = Work(3, fails=KeyError("first")), Work(1000, cleans=50)

    async def main() -> None:
        call = asyncio.create_task(structured_gather([failing(), other()]))
        await turns(20)
        assert other.cancelled == 1
        assert not other.cleaned
        call.cancel()
        with pytest.raises(asyncio.CancelledError) as raised:
            await call
        assert isinstance(raised.value.__context__, KeyError)
        assert other.cleaned

    assert go(main()) == []


def test_a_deadline_around_it_is_distinguished_from_a_cancellation() -> None:
    work = Work(1_000_000, cleans=5)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await structured_gather([work()])

    assert go(main()) == []
    assert work.cleaned
