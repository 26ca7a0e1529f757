"""Several things at once, or none of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

R = TypeVar("R")


async def together(coroutines: Iterable[Coroutine[Any, Any, R]]) -> list[R]:
    """Runs coroutines side by side; their results, in order.

    When one fails, or the caller is cancelled, each that still runs is cancelled once and waited for until it has cleaned
    up, however often the caller is cancelled meanwhile. So none is left running when this returns, or raises the first
    error or the caller's cancellation.

        A has returned, B raises, C is cancelled and cleans up; now the caller is cancelled; C goes on cleaning up and
        ends; then the caller hears of its cancellation
    """
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        # waits: for what it was given. `gather` alone would pass every cancellation on, and cut cleanups short
        return await asyncio.gather(*(asyncio.shield(task) for task in tasks))
    finally:
        for task in tasks:
            task.cancel()
        await _ended(tasks)


async def _ended(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Returns when all have ended; the caller's cancellations wait until then."""
    cancelled: asyncio.CancelledError | None = None
    while running := [task for task in tasks if not task.done()]:
        try:
            # waits: they were cancelled
            await asyncio.wait(running)
        except asyncio.CancelledError as error:
            cancelled = error
    for task in tasks:
        if not task.cancelled():
            task.exception()  # looked at: an error on the way out is no news beside the one that led there
    if cancelled is not None:
        raise cancelled
