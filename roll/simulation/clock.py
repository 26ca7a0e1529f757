"""An event loop on a virtual clock: time advances when nothing else is ready, without waiting.

Invariants: `loop.time()` never decreases; callbacks of the same time run in the order they were scheduled; nothing
depends on the speed of the machine. Work in threads (`run_in_executor`, `asyncio.to_thread`) takes no virtual time: the
clock stops until it is done. There are no sockets, pipes or signals.

    async def main() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    run(main())  # 3600.0, at once
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_CANCELLED_KEPT = 64
"""Cancelled timers stay in the queue up to this number, or up to half of the queue."""


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set, so the awaited event can never come."""


class VirtualLoop(asyncio.BaseEventLoop):
    _ready: deque[asyncio.Handle]
    _stopping: bool

    def __init__(self, start_s: float = 0.0) -> None:
        super().__init__()
        self._now_s = start_s
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._order = itertools.count()
        self._cancelled_timers = 0
        self._in_threads = 0
        self._woken = threading.Event()

    def time(self) -> float:
        return self._now_s

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self._in_threads += 1
        future.add_done_callback(self._back_from_thread)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Waits for the threads here, because the loop does not count them."""
        executor = self._default_executor  # type: ignore[attr-defined]
        if executor is not None:
            executor.shutdown(wait=True)

    def close(self) -> None:
        super().close()
        self._timers.clear()

    def _run_once(self) -> None:
        """One iteration: runs what is ready now; callbacks that become ready run in the next iteration."""
        if not self._ready and not self._stopping:
            self._go_on()
        self._make_due_ready()
        ready = self._ready
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _go_on(self) -> None:
        """Waits for threads, or else advances the clock to the next timer."""
        while self._in_threads and not self._ready:
            self._woken.wait()
            self._woken.clear()
        if self._ready:
            return
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
            self._cancelled_timers -= 1
        if not timers:
            raise Deadlock(self._who_waits())
        self._now_s = max(self._now_s, timers[0][0])

    def _make_due_ready(self) -> None:
        timers = self._timers
        while timers and timers[0][0] <= self._now_s:
            timer = heapq.heappop(timers)[2]
            timer._scheduled = False  # type: ignore[attr-defined]
            if timer._cancelled:
                self._cancelled_timers -= 1
            else:
                self._ready.append(timer)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Called by a timer that is cancelled. Most deadlines are cancelled, so they must not accumulate."""
        if not handle._scheduled:  # type: ignore[attr-defined]
            return
        self._cancelled_timers += 1
        if self._cancelled_timers > max(_CANCELLED_KEPT, len(self._timers) // 2):
            self._timers = [entry for entry in self._timers if not entry[2]._cancelled]
            heapq.heapify(self._timers)
            self._cancelled_timers = 0

    def _back_from_thread(self, future: asyncio.Future[Any]) -> None:
        self._in_threads -= 1

    def _write_to_self(self) -> None:
        """Called after another thread has made something ready."""
        self._woken.set()

    def _who_waits(self) -> str:
        tasks = sorted(task.get_name() for task in asyncio.all_tasks(self))
        some = ", ".join(tasks[:5]) + (", …" if len(tasks) > 5 else "")
        return f"deadlock: nothing is scheduled at {self._now_s:g} s, and {len(tasks)} tasks wait: {some}"


def run(main: Coroutine[Any, Any, T], start_s: float = 0.0) -> T:
    """Runs a coroutine on a virtual clock that begins at `start_s`; tasks that it leaves running are cancelled."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(start_s)) as runner:
        return runner.run(main)
