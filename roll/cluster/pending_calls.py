"""The calls of a cluster that are in flight, with one timer for the deadlines of all of them.

All calls have the same deadline, so they expire in the order in which they were made: the timer is set for the oldest.

Invariants: a call that takes longer than the deadline is cancelled and raises `CallTimedOut`; a call that was cancelled
by something else raises `CancelledError`; no timer is left when no call is in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from typing import Any

from roll.cluster.errors import CallTimedOut


@dataclass(frozen=True)
class PendingCall:
    """An in-flight call."""

    worker: str
    method: str
    since_s: float
    """Seconds since the call was made."""


class _Call:
    __slots__ = ("began_s", "cancellations", "method", "overdue", "task", "worker")

    def __init__(self, worker: str, method: str, began_s: float, task: asyncio.Task[Any]) -> None:
        self.worker = worker
        self.method = method
        self.began_s = began_s
        self.task = task
        self.cancellations = task.cancelling()
        """Requests to cancel the task that were made before the call."""
        self.overdue = False


class PendingCalls:
    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._calls: dict[_Call, None] = {}
        """Oldest first."""
        self._timer: asyncio.TimerHandle | None = None

    def __iter__(self) -> Iterator[PendingCall]:
        now_s = asyncio.get_running_loop().time()
        return iter([PendingCall(call.worker, call.method, now_s - call.began_s) for call in self._calls])

    async def run(self, worker: str, method: str, awaitable: Awaitable[Any]) -> Any:
        """The result of a call, which may take up to the deadline."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "calls are made in tasks"
        call = _Call(worker, method, loop.time(), task)
        self._calls[call] = None
        if self._timer is None:
            self._timer = loop.call_at(call.began_s + self.deadline_s, self._cancel_overdue)
        try:
            # waits: until `_cancel_overdue`
            return await awaitable
        except asyncio.CancelledError:
            if call.overdue and task.cancelling() <= call.cancellations + 1:  # only the deadline cancelled it
                raise CallTimedOut(worker, method, self.deadline_s) from None
            raise
        finally:
            if call.overdue:
                task.uncancel()
            self._end(call)

    def _end(self, call: _Call) -> None:
        del self._calls[call]
        if not self._calls and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cancel_overdue(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        for call in self._calls:
            if call.overdue:
                continue
            ends_s = call.began_s + self.deadline_s
            if ends_s > loop.time():
                self._timer = loop.call_at(ends_s, self._cancel_overdue)
                break
            call.overdue = True
            call.task.cancel()
