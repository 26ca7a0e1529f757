"""Who waits for room in the environment processes, and whose turn it is.

What always holds: of those whose kind may have one more episode, the one that came first goes first; a kind at its limit
holds up nobody else. What a turn costs does not grow with the number that waits.
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
    def place(self) -> int:
        """Smaller for who came first."""

    @property
    def turn(self) -> asyncio.Future[None] | None:
        """Done when it need not wait any more."""


W = TypeVar("W", bound=Waiter)


class AdmissionQueue(Generic[W]):
    """Those that wait, and how many of each kind are inside. `limits` is the most of a kind that may be; kinds without
    have no limit of their own."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        self._limits = dict(limits)
        self._queues: dict[str, deque[W]] = {}
        """By kind; all kinds without a limit share one."""
        self.inside: Counter[str] = Counter()

    def __iter__(self) -> Iterator[W]:
        return (waiter for queue in self._queues.values() for waiter in queue)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def limit(self, kind: str) -> int | None:
        """The most of a kind that may be inside; None if it has no limit of its own."""
        return self._limits.get(kind)

    def join(self, waiter: W) -> None:
        self._queues.setdefault(waiter.kind if waiter.kind in self._limits else "", deque()).append(waiter)

    def first(self) -> W | None:
        """Whose turn it is; None if nobody's."""
        heads = [queue[0] for queue in self._queues.values() if _skip_done(queue)]
        return min(filter(self._may_enter, heads), key=lambda head: head.place, default=None)

    def enter(self, waiter: W) -> None:
        """The one whose turn it was is inside."""
        queue = self._queues[waiter.kind if waiter.kind in self._limits else ""]
        assert queue[0] is waiter, "turns are given to the first of a queue"
        queue.popleft()
        self.inside[waiter.kind] += 1

    def leave(self, waiter: W) -> None:
        """One that was inside is not any more."""
        self.inside[waiter.kind] -= 1

    def clear(self) -> list[W]:
        """Sends everybody away who waits."""
        waiters = list(self)
        self._queues.clear()
        return waiters

    def _may_enter(self, waiter: W) -> bool:
        limit = self.limit(waiter.kind)
        return limit is None or self.inside[waiter.kind] < limit


def _skip_done(queue: deque[W]) -> bool:
    """Whether somebody in the queue still waits, who is its first then."""
    while queue and queue[0].turn is not None and queue[0].turn.done():
        queue.popleft()
    return bool(queue)
