"""Batch selection: when the batch of a step is complete, and which groups it contains.

With `batch_selection: in_order` a batch is the N oldest issued groups, and the step waits for older groups that are
still open. With `batch_selection: first_finished` it is the first N to finish. With `staleness_policy: mask` or `drop`
(and `max_staleness` above 0) the step never waits for open groups once N are ready. With `staleness_policy: wait` a group
that would be too old for the next step must be part of this one.

Example with `batch_selection: in_order` and 2 groups per step: groups 3 and 5 are ready and 4 is open, so the step waits
for 4; once 4 is ready, the batch is 3 and 4, and 5 belongs to the next step.
"""

from __future__ import annotations

from dataclasses import dataclass

from roll.config.schema import RolloutConfig
from roll.data.sample import Group
from roll.scheduler.group_table import GroupTable
from roll.scheduler.task_sampler import BatchPolicy


@dataclass(frozen=True)
class BatchSelector:
    """Selects the batch of a step from the current state of the group table."""

    table: GroupTable
    config: RolloutConfig
    batch_policy: BatchPolicy
    version: int
    """Version of the weights that the step trains."""

    @property
    def limit(self) -> int:
        """The oldest version that this step may train on; groups of this version are too old for the next step."""
        return self.version - self.config.max_staleness

    @property
    def in_order(self) -> bool:
        """Whether the step waits for older groups that are still open."""
        return self.batch_policy.batch_selection == "in_order" and (
            self.config.staleness_policy == "wait" or not self.config.max_staleness
        )

    def has_enough(self) -> bool:
        ready = self.table.ready_before_any_open() if self.in_order else len(self.table.ready)
        return ready >= self.config.groups_per_step

    def waits_for_late(self) -> bool:
        """Whether an open group must be part of this step, because it would be too old for the next."""
        if not self.config.max_staleness or self.config.staleness_policy != "wait":
            return False
        oldest = self.table.oldest_open_version
        return oldest is not None and oldest <= self.limit

    def late_groups(self) -> list[Group]:
        """The open groups that the step waits for because of their age."""
        return [g for g in self.table.open.values() if g.version <= self.limit] if self.waits_for_late() else []

    def awaited_groups(self) -> list[Group]:
        """Open groups without which the batch cannot be complete."""
        table, wanted = self.table, self.config.groups_per_step
        if self.in_order or len(table.open) + len(table.ready) <= wanted:
            first = sorted([*table.open, *table.ready])[:wanted]
            needed = [table.open[index] for index in first if index in table.open]
        else:
            needed = []
        return sorted({g.index: g for g in (*needed, *self.late_groups())}.values(), key=lambda group: group.index)

    def pick(self) -> list[Group]:
        """The groups of the batch: those that would be too old for the next step come first, then the order is that of
        `batch_selection`."""
        groups = (
            self.table.ready_in_order()
            if self.batch_policy.batch_selection == "in_order"
            else list(self.table.ready.values())
        )
        groups.sort(key=lambda group: (old := group.oldest) is not None and old > self.limit)
        return sorted(groups[: self.config.groups_per_step], key=lambda group: group.index)
