"""A pool of processes that run user code: it starts them, replaces those that ended, and ends them all.

The pools of graders and of environments are two uses of it. They decide which process gets which work, and when a process
has to be replaced; this module knows neither.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from roll.config.errors import RunError
from roll.process.structured_gather import structured_gather

_log = logging.getLogger(__name__)

_START_TRIES = 3


class PooledProcess(Protocol):
    def kill(self) -> None:
        """Ends it and all its children, now. May be called again."""
        ...

    async def wait_exit(self) -> None:
        """Waits, for a bounded time, until a killed process has ended."""
        ...


P = TypeVar("P", bound=PooledProcess)


class ProcessPool(Generic[P]):
    """`size` processes, each made by `start`.

    Invariant: from `start` until the end, each of the `size` processes has been given to `on_ready` and is the owner's to
    use, or is being replaced, which takes bounded time. The pool ends by `close`, or when no replacement starts in three
    tries; `on_end` is then called with the error that every later call gets.

        two processes, A and B; A hangs, and its owner calls `replace(A)`: A is killed at once; when it has ended, C is
        started and given to `on_ready`; if C does not start in three tries, the pool ends
    """

    def __init__(
        self,
        noun: str,
        size: int,
        start: Callable[[], Awaitable[P]],
        on_ready: Callable[[P], None],
        on_end: Callable[[RunError], None],
    ) -> None:
        """`noun`: what the processes are, for messages: `grader`. `start` takes bounded time."""
        self._noun = noun
        self._size = size
        self._start = start
        self._on_ready = on_ready
        self._on_end = on_end
        self._processes: set[P] = set()
        self._replacements: set[asyncio.Task[None]] = set()
        # starting more at once would slow each other beyond the start deadline
        self._starts = asyncio.Semaphore(os.cpu_count() or 1)
        self._end_error: RunError | None = RunError(f"the {noun} pool was not started")
        self.restarts = 0
        """Processes replaced."""

    @property
    def processes(self) -> frozenset[P]:
        """All that have not ended yet, those that `launch` started among them."""
        return frozenset(self._processes)

    @property
    def replacements(self) -> frozenset[asyncio.Task[None]]:
        """The replacements in progress."""
        return frozenset(self._replacements)

    @property
    def ended(self) -> bool:
        return self._end_error is not None

    def raise_if_ended(self) -> None:
        if self._end_error is not None:
            raise RunError(str(self._end_error))

    async def start(self) -> None:
        """Starts all processes. If one does not start, the pool is closed, and the error raised."""
        self._end_error = None
        try:
            await structured_gather(self._add() for _ in range(self._size))
        except BaseException:
            await self.close()
            raise

    async def launch(self, start: Callable[[], Awaitable[P]] | None = None) -> P:
        """Starts one more process, which is not replaced when it ends. The caller retires it."""
        async with self._starts:
            # waits: each start has a deadline
            process = await (start or self._start)()
        self._processes.add(process)
        return process

    def replace(self, process: P) -> None:
        """Kills a process at once and starts another in its place, in the background."""
        process.kill()
        if not self.ended:
            task = asyncio.create_task(self._replacement(process))
            self._replacements.add(task)
            task.add_done_callback(self._replacements.discard)

    async def retire(self, process: P) -> None:
        """Ends a process and waits for it."""
        process.kill()
        await process.wait_exit()
        self._processes.discard(process)

    def end(self, error: RunError | None = None) -> None:
        """Makes every later call fail: with the error, or because the pool was closed. The first error is kept."""
        self._end_error = self._end_error or error or RunError(f"the {self._noun} pool was closed")
        self._on_end(self._end_error)

    async def close(self) -> None:
        """Ends the pool and all processes, and waits for them. May be called again."""
        self.end()
        replacements = list(self._replacements)
        for replacement in replacements:
            replacement.cancel()
        # waits: they were cancelled
        await asyncio.gather(*replacements, return_exceptions=True)
        await asyncio.gather(*(self.retire(process) for process in list(self._processes)))

    async def _add(self) -> None:
        self._on_ready(await self.launch())

    async def _replacement(self, process: P) -> None:
        await self.retire(process)
        for tries_left in reversed(range(_START_TRIES)):
            try:
                fresh = await self.launch()
            except Exception as error:
                _log.warning("a replacement of the %s process did not start: %s", self._noun, error)
                if not tries_left:
                    self.end(RunError(f"no {self._noun} process starts any more ({_START_TRIES} tries): {error}"))
            else:
                self.restarts += 1
                self._on_ready(fresh)
                return
