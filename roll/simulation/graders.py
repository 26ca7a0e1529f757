"""A pool of graders: `servers` jobs at a time, the others wait in order.

Invariants: no grader is idle while a response waits; `done` is called once for every response that is not cancelled.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass
class SimGraderStats:
    busy_s: float = 0.0
    """Seconds of finished and cancelled work, over all graders."""
    graded: int = 0
    queue_high: int = 0
    """Maximum number of waiting responses."""


@dataclass(slots=True)
class _Job:
    id: str
    service_s: float
    done: Callable[[str], None]
    began_s: float = 0.0
    timer: asyncio.TimerHandle | None = None


class SimGraderPool:
    def __init__(self, loop: asyncio.AbstractEventLoop, servers: int) -> None:
        if servers < 1:
            raise ValueError(f"a pool needs at least one grader, got {servers}")
        self.servers = servers
        self._loop = loop
        self._waiting: OrderedDict[str, _Job] = OrderedDict()
        self._serving: dict[str, _Job] = {}
        self._stats = SimGraderStats()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def serving(self) -> int:
        return len(self._serving)

    @property
    def stats(self) -> SimGraderStats:
        return replace(self._stats)

    def submit(self, id: str, service_s: float, done: Callable[[str], None]) -> None:
        if id in self._waiting or id in self._serving:
            raise ValueError(f"response {id!r} is being graded already")
        self._waiting[id] = _Job(id, service_s, done)
        self._serve()
        self._stats.queue_high = max(self._stats.queue_high, len(self._waiting))

    def cancel(self, id: str) -> None:
        """Cancels a response; its grader is free at once."""
        if self._waiting.pop(id, None) is not None:
            return
        if id not in self._serving:
            raise KeyError(f"response {id!r} is not being graded")
        self._leave(self._serving[id])
        self._serve()

    def _serve(self) -> None:
        while self._waiting and len(self._serving) < self.servers:
            _, job = self._waiting.popitem(last=False)
            job.began_s = self._loop.time()
            job.timer = self._loop.call_at(job.began_s + job.service_s, self._finish, job)
            self._serving[job.id] = job

    def _finish(self, job: _Job) -> None:
        self._leave(job)
        self._stats.graded += 1
        self._serve()
        job.done(job.id)

    def _leave(self, job: _Job) -> None:
        assert job.timer is not None
        job.timer.cancel()
        del self._serving[job.id]
        self._stats.busy_s += self._loop.time() - job.began_s
