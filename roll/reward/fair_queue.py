"""The fair queue in front of the graders: each domain has its own queue, so that a slow domain delays only itself.

The next job is taken from the domain with the fewest running jobs, among several from the one served least recently;
within a domain it is first in, first out. Example: with four graders, a domain whose verdicts take minutes and one whose
verdicts take milliseconds, both always waiting, have two graders each.
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

    def enqueue(self, domain: str, at_front: bool = False) -> asyncio.Future[G]:
        """Adds a waiter to the domain's queue, at its end or, with `at_front`, before all others. The caller of `pop`
        sets its result."""
        waiter: asyncio.Future[G] = asyncio.get_running_loop().create_future()
        queue = self._queues.setdefault(domain, deque())
        if at_front:
            queue.appendleft(waiter)
        else:
            queue.append(waiter)
        return waiter

    def pop(self) -> tuple[str, asyncio.Future[G]] | None:
        """Removes and returns the next waiter and its domain, or None if no job waits."""
        for queue in self._queues.values():
            while queue and queue[0].done():  # the waiter was cancelled
                queue.popleft()
        waiting = [domain for domain, queue in self._queues.items() if queue]
        if not waiting:
            return None
        domain = min(waiting, key=lambda name: (self._running[name], self._served.get(name, 0)))
        return domain, self._queues[domain].popleft()

    def begin(self, domain: str) -> None:
        """Records that a job of the domain got a grader."""
        self._count += 1
        self._served[domain] = self._count
        self._running[domain] += 1

    def end(self, domain: str) -> None:
        """Records that a job of the domain released its grader."""
        self._running[domain] -= 1

    def clear(self) -> Iterator[asyncio.Future[G]]:
        """Removes and returns all waiters."""
        for queue in self._queues.values():
            while queue:
                waiter = queue.popleft()
                if not waiter.done():
                    yield waiter
