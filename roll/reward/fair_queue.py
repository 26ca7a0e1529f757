"""Whose turn it is when a grader is free: domains wait in queues of their own, so that a slow one holds up only itself.

The next job is of the domain with the fewest jobs running, of several such of the one served least recently; within a
domain, of those that came first. With four graders, a domain whose verdicts take minutes and one whose verdicts take
milliseconds, both always waiting, each has two.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator
from typing import Generic, TypeVar

G = TypeVar("G")


class FairQueue(Generic[G]):
    def __init__(self) -> None:
        self._queues: dict[str, deque[asyncio.Future[G]]] = {}
        self._running: Counter[str] = Counter()
        self._served: dict[str, int] = {}
        self._count = 0

    def wait(self, domain: str, ahead: bool = False) -> asyncio.Future[G]:
        """A place in the domain's queue, at its end or `ahead` of all in it. Who calls `next` sets its result."""
        turn: asyncio.Future[G] = asyncio.get_running_loop().create_future()
        queue = self._queues.setdefault(domain, deque())
        if ahead:
            queue.appendleft(turn)
        else:
            queue.append(turn)
        return turn

    def next(self) -> tuple[str, asyncio.Future[G]] | None:
        """The domain and the place whose turn it is, taken from its queue, or None if nobody waits."""
        for queue in self._queues.values():
            while queue and queue[0].done():  # who waited was cancelled
                queue.popleft()
        waiting = [domain for domain, queue in self._queues.items() if queue]
        if not waiting:
            return None
        domain = min(waiting, key=lambda name: (self._running[name], self._served.get(name, 0)))
        return domain, self._queues[domain].popleft()

    def begin(self, domain: str) -> None:
        """A job of the domain has a grader."""
        self._count += 1
        self._served[domain] = self._count
        self._running[domain] += 1

    def end(self, domain: str) -> None:
        """It has none any more."""
        self._running[domain] -= 1

    def clear(self) -> Iterator[asyncio.Future[G]]:
        """All who wait, taken from their queues."""
        for queue in self._queues.values():
            while queue:
                turn = queue.popleft()
                if not turn.done():
                    yield turn
