"""When a step can be closed, and with which groups.

In order, a step is the oldest groups that were issued, whoever was faster; with `cut: first`, or where old tokens are
masked or dropped, the first to be ready. With `stale: wait` a group that would be too old for the next step must be of
this one.

Example, in order, 2 groups a step: 3 and 5 are ready and 4 is open, so the step waits for 4; once it is ready it is 3 and
4, and 5 is of the next.
"""

from __future__ import annotations

from dataclasses import dataclass

from roll.config.schema import RolloutConfig
from roll.data.sample import Group
from roll.scheduler.group_table import GroupTable
from roll.scheduler.task_sampler import BatchPolicy


@dataclass(frozen=True)
class BatchSelector:
    """A step as the books stand."""

    books: GroupTable
    config: RolloutConfig
    shape: BatchPolicy
    version: int
    """Of the weights, which the step is trained at."""

    @property
    def limit(self) -> int:
        """The oldest version that may be trained on now; what is of it will be too old for the next step."""
        return self.version - self.config.max_staleness

    @property
    def in_order(self) -> bool:
        """Whether an older group that is open is waited for."""
        return self.shape.cut == "in_order" and (self.config.stale == "wait" or not self.config.max_staleness)

    def enough(self) -> bool:
        ready = self.books.ready_before_any_open() if self.in_order else len(self.books.ready)
        return ready >= self.config.groups_per_step

    def waits_for_late(self) -> bool:
        """Whether an open group must be of this step, because it will be too old for the next."""
        if not self.config.max_staleness or self.config.stale != "wait":
            return False
        oldest = self.books.oldest_open_version
        return oldest is not None and oldest <= self.limit

    def late(self) -> list[Group]:
        """The groups that are waited for because of their age."""
        return [g for g in self.books.open.values() if g.version <= self.limit] if self.waits_for_late() else []

    def waited_for(self) -> list[Group]:
        """Open groups without which the step cannot be closed."""
        books, wanted = self.books, self.config.groups_per_step
        if self.in_order or len(books.open) + len(books.ready) <= wanted:
            first = sorted([*books.open, *books.ready])[:wanted]
            needed = [books.open[index] for index in first if index in books.open]
        else:
            needed = []
        return sorted({g.index: g for g in (*needed, *self.late())}.values(), key=lambda group: group.index)

    def pick(self) -> list[Group]:
        """The groups of the step: those that would get too old first, then by its cut."""
        groups = self.books.oldest_ready() if self.shape.cut == "in_order" else list(self.books.ready.values())
        groups.sort(key=lambda group: (old := group.oldest) is not None and old > self.limit)
        return sorted(groups[: self.config.groups_per_step], key=lambda group: group.index)
