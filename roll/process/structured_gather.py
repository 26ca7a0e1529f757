"""A gather with structured cancellation: no coroutine outlives it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

R = TypeVar("R")


async def structured_gather(coroutines: Iterable[Coroutine[Any, Any, R]]) -> list[R]:
    """Runs coroutines concurrently and returns their results in order.

    If one fails, or the caller is cancelled, each running coroutine is cancelled once and awaited until it has cleaned
    up, however often the caller is cancelled in the meantime. So none is running any more when this returns, or raises
    the first error or the caller's cancellation.

        A has returned, B raises, C is cancelled and cleans up; now the caller is cancelled; C finishes its clean-up and
        ends; then the caller's cancellation is raised
    """
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        # waits: for its coroutines. `gather` alone would pass every cancellation on and interrupt their clean-up
        return await asyncio.gather(*(asyncio.shield(task) for task in tasks))
    finally:
        for task in tasks:
            task.cancel()
        await _await_all(tasks)


async def _await_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Returns when all tasks have ended; a cancellation of the caller is raised only then."""
    cancelled: asyncio.CancelledError | None = None
    while running := [task for task in tasks if not task.done()]:
        try:
            # waits: they were cancelled
            await asyncio.wait(running)
        except asyncio.CancelledError as error:
            cancelled = error
    for task in tasks:
        if not task.cancelled():
            task.exception()  # retrieved so that asyncio does not warn; the original error is already being raised
    if cancelled is not None:
        raise cancelled
