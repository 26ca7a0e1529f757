"""The event loop that a process's async environments share. Imported when the first of them is created."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

R = TypeVar("R")


class SharedLoop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        threading.Thread(target=self._run, daemon=True).start()

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs the coroutine. May be called from any thread."""
        self._loop.call_soon_threadsafe(self._create_task, work)

    def wait_for(self, awaitable: Awaitable[R]) -> R:
        """Awaits something on behalf of a thread other than the loop's."""

        async def wait() -> R:
            # waits: the pool has a deadline for every call
            return await awaitable

        return asyncio.run_coroutine_threadsafe(wait(), self._loop).result()

    def _create_task(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._loop.create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while True:
            try:
                self._loop.run_forever()
            except BaseException:  # a task of an environment called sys.exit(): the others continue
                traceback.print_exc()
