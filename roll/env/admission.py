"""The admission queue: which episodes wait for a slot in the environment processes, and which is next.

Invariants: among the episodes whose environment may have one more, the one that came first is admitted first; an
environment at its limit does not delay others. The cost of an admission does not grow with the number of waiting
episodes.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Generic, Protocol, TypeVar


class Waiter(Protocol):
    @property
    def kind(self) -> str: ...

    @property
    def queue_position(self) -> int:
        """Smaller for waiters that came earlier."""

    @property
    def admitted(self) -> asyncio.Future[None] | None:
        """Done when the waiter no longer waits."""


W = TypeVar("W", bound=Waiter)


class AdmissionQueue(Generic[W]):
    """The waiting episodes, and how many of each kind have been admitted. `limits` is the maximum per kind; a kind
    without an entry has no limit of its own."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        self._limits = dict(limits)
        self._queues: dict[str, deque[W]] = {}
        """By kind; all kinds without a limit share one queue."""
        self.admitted_counts: Counter[str] = Counter()

    def __iter__(self) -> Iterator[W]:
        return (waiter for queue in self._queues.values() for waiter in queue)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def limit(self, kind: str) -> int | None:
        """The maximum of a kind; None if it has no limit of its own."""
        return self._limits.get(kind)

    def add(self, waiter: W) -> None:
        self._queues.setdefault(waiter.kind if waiter.kind in self._limits else "", deque()).append(waiter)

    def first(self) -> W | None:
        """The next waiter to admit; None if none can be admitted."""
        first_waiters = [queue[0] for queue in self._queues.values() if _skip_done(queue)]
        return min(filter(self._is_admissible, first_waiters), key=lambda waiter: waiter.queue_position, default=None)

    def admit(self, waiter: W) -> None:
        """Admits the waiter that `first` returned."""
        queue = self._queues[waiter.kind if waiter.kind in self._limits else ""]
        assert queue[0] is waiter, "only the first of a queue is admitted"
        queue.popleft()
        self.admitted_counts[waiter.kind] += 1

    def release(self, waiter: W) -> None:
        """Frees the slot of an admitted waiter."""
        self.admitted_counts[waiter.kind] -= 1

    def clear(self) -> list[W]:
        """Removes and returns all waiting waiters."""
        waiters = list(self)
        self._queues.clear()
        return waiters

    def _is_admissible(self, waiter: W) -> bool:
        limit = self.limit(waiter.kind)
        return limit is None or self.admitted_counts[waiter.kind] < limit


def _skip_done(queue: deque[W]) -> bool:
    """Removes cancelled or admitted waiters from the front; returns whether one is left, which is then the first."""
    while queue and queue[0].admitted is not None and queue[0].admitted.done():
        queue.popleft()
    return bool(queue)
