"""The rollout scheduler: issues groups, keeps those worth training on, replaces the others at once.

There is no batch barrier: a response is judged while others are still generated, a group is filtered the moment its last
sample is judged, and a dropped group's replacement is issued right then.

What always holds: groups are issued in the order of their index and each rejection issues exactly one more (up to the
step's bound), so which groups a step issues, and which it keeps, does not depend on timing. With 4 groups wanted and
groups 1 and 4 without signal: 0 1 2 3 are issued, 4 replaces 1, 5 replaces 4, and the batch is 0 2 3 5.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from roll.config.errors import RunError
from roll.config.schema import RolloutConfig
from roll.data.batch import Batch
from roll.data.sample import Group, Sample
from roll.data.sources import TaskSet
from roll.rollout.filters import FILTERS
from roll.rollout.lifecycle import Lifecycle
from roll.rollout.pool import RolloutPool


@dataclass(frozen=True)
class Rollout:
    """What one step's rollout gave: the batch (None if no group was kept), all its groups, and why some were dropped."""

    batch: Batch | None
    kept: list[Group]
    groups: list[Group]
    dropped: dict[str, int]

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group.samples]


class RolloutScheduler:
    def __init__(self, tasks: TaskSet, pool: RolloutPool, lifecycle: Lifecycle, config: RolloutConfig, seed: int) -> None:
        self._tasks = tasks
        self._pool = pool
        self._lifecycle = lifecycle
        self._config = config
        self._seed = seed
        self._filter = FILTERS[config.filter]
        self.next_group = 0
        """Index of the next group to issue; all that is needed to go on after a restart."""

    async def next_rollout(self) -> Rollout:
        """Makes one step's batch. Raises when no sample at all could be judged."""
        wanted = self._config.groups_per_step
        most = wanted + int(wanted * self._config.max_replacements + 1e-9)
        groups: list[Group] = []
        kept: list[Group] = []
        dropped: dict[str, int] = {}
        running: set[asyncio.Task[Group]] = set()
        done: set[asyncio.Task[Group]] = set()
        try:
            for _ in range(wanted):
                running.add(self._issue(groups))
            while running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for group in sorted((task.result() for task in done), key=lambda g: g.index):
                    reason = self._judge(group)
                    if reason is None:
                        kept.append(group)
                        continue
                    dropped[reason] = dropped.get(reason, 0) + 1
                    if len(groups) < most:
                        running.add(self._issue(groups))
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, *done, return_exceptions=True)
        self._refuse_total_failure(groups)
        kept.sort(key=lambda group: group.index)
        samples = [sample for group in kept for sample in group.scored]
        batch = await self._pool.batch(samples) if samples else None
        for sample in samples:
            self._lifecycle.move(sample, "kept")
        return Rollout(batch, kept, groups, dropped)

    def _issue(self, groups: list[Group]) -> asyncio.Task[Group]:
        index = self.next_group
        self.next_group += 1
        task = self._tasks.nth(index, self._seed)
        samples = [Sample(f"{index}.{i}", task, index, self._config.temperature) for i in range(self._config.group_size)]
        group = Group(index, task, samples)
        groups.append(group)
        for sample in samples:
            self._lifecycle.move(sample, "queued", task=task.id, group=index)
        return asyncio.create_task(self._run(group))

    async def _run(self, group: Group) -> Group:
        await self._pool.run(str(group.index), group.samples, self._lifecycle)
        return group

    def _judge(self, group: Group) -> str | None:
        """Why the group is dropped, None if it is kept; dropped samples are moved."""
        scored = group.scored
        reason = self._filter(group) if len(scored) > 1 else "fewer than two samples could be judged"
        if reason is not None:
            for sample in scored:
                self._lifecycle.move(sample, "dropped", reason)
        return reason

    def _refuse_total_failure(self, groups: list[Group]) -> None:
        samples = [sample for group in groups for sample in group.samples]
        reasons = [sample.reason for sample in samples if sample.state == "failed"]
        if len(reasons) < len(samples):
            return
        commonest = max(set(reasons), key=reasons.count)
        raise RunError(
            f"all {len(samples)} samples of the step failed, so there is nothing to train on; "
            f"the reason of {reasons.count(commonest)} of them: {commonest}"
        )
