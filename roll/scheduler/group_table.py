"""The group table: all in-flight groups by state.

A group is in flight from the moment it is issued until it is trained on or dropped:

    issued → open → ready → taken → trained
               └──────┴→ dropped

Invariant: each in-flight group is in exactly one of `open`, `ready` and `taken`. The scheduler limits their number.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter

from roll.data.sample import Group


class GroupTable:
    def __init__(self) -> None:
        self.open: dict[int, Group] = {}
        """Groups with samples that are not judged yet."""
        self.ready: dict[int, Group] = {}
        """Groups that passed the filter, in the order they finished."""
        self.taken: dict[int, Group] = {}
        """Groups that are being trained on."""
        self._ready_order: list[int] = []
        self._open_heap: list[int] = []
        self._versions: Counter[int] = Counter()
        """Number of open groups per weights version at which they were issued."""

    @property
    def in_flight(self) -> int:
        return len(self.open) + len(self.ready) + len(self.taken)

    @property
    def waiting(self) -> list[Group]:
        """Groups that no step has taken yet: open and ready ones."""
        return [*self.open.values(), *self.ready.values()]

    def issue(self, group: Group) -> None:
        self.open[group.index] = group
        self._versions[group.version] += 1
        heapq.heappush(self._open_heap, group.index)

    def finish(self, group: Group) -> None:
        del self.open[group.index]
        self._versions[group.version] -= 1
        self.add_ready(group)

    def add_ready(self, group: Group) -> None:
        """Adds a group to `ready`."""
        self.ready[group.index] = group
        insort(self._ready_order, group.index)

    def drop(self, group: Group) -> None:
        if self.open.pop(group.index, None) is None:
            self._remove_ready(group)
        else:
            self._versions[group.version] -= 1

    @property
    def oldest_open_version(self) -> int | None:
        """The oldest weights version at which an open group was issued; None without open groups."""
        self._versions = +self._versions  # unary plus removes zero counts
        return min(self._versions, default=None)

    def take(self, groups: list[Group]) -> None:
        for group in groups:
            self._remove_ready(group)
            self.taken[group.index] = group

    def reopen(self, group: Group) -> None:
        """Moves a taken or ready group back to `open`, to run again."""
        if self.taken.pop(group.index, None) is None:
            self._remove_ready(group)
        self.issue(group)

    def remove_trained(self, groups: list[Group]) -> None:
        for group in groups:
            del self.taken[group.index]

    def ready_in_order(self) -> list[Group]:
        """Ready groups in the order they were issued."""
        return [self.ready[index] for index in self._ready_order]

    def not_ready(self) -> list[Group]:
        """Groups in flight that are not ready: open ones, and those that a step has taken."""
        return [*self.open.values(), *self.taken.values()]

    def ready_before_any_open(self) -> int:
        """Number of ready groups that are older than every open group."""
        first = self.first_open()
        return len(self._ready_order) if first is None else bisect_left(self._ready_order, first.index)

    def first_open(self) -> Group | None:
        """The open group that was issued first."""
        heap = self._open_heap
        while heap and heap[0] not in self.open:
            heapq.heappop(heap)
        return self.open[heap[0]] if heap else None

    def _remove_ready(self, group: Group) -> None:
        del self.ready[group.index]
        del self._ready_order[bisect_left(self._ready_order, group.index)]
