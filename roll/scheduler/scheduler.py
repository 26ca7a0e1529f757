"""The Rollout Scheduler of the paper (arXiv 2506.06122): it issues groups, keeps those worth training on, and replaces
the rejected ones at once.

There is no batch barrier: a response is scored while others are still being generated, a group is filtered as soon as its
last sample is judged (scored or failed), and the replacement of a dropped group is issued in the same moment. With
`max_staleness: k` above 0, groups of the next k steps are generated while the trainer trains on the current one.

Invariants:

- *Volume*: at most (k + 1) × groups_per_step groups, plus the oversampled ones, are in flight. A group counts from the
  moment it is issued until it is trained on or dropped.
- *Age*: when a step trains at version v, none of its tokens is older than v - k (with `staleness_policy: mask`: no token
  that contributes to the loss).
- *On-policy* (k = 0, no oversampling): groups are issued in the order of their index and each rejection issues exactly
  one more (up to the step's bound), so the groups that a step issues and keeps do not depend on timing. Example: 4 groups
  are wanted and groups 1 and 4 have no signal. Groups 0 1 2 3 are issued, 4 replaces 1, 5 replaces 4, and the batch is
  0 2 3 5.
- Every task that the sampler drew is trained on, dropped with a reason, or drawn again.
- *Greedy baseline*: each group has one extra sample, generated at temperature 0. Its reward is the `baseline` of the
  training samples; a group whose greedy sample could not be scored is dropped. The greedy sample itself is moved to
  `dropped` in the ledger when its group is trained on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from roll.cluster.errors import RemoteError
from roll.config.errors import RunError
from roll.config.schema import RolloutConfig
from roll.data.sample import Group, Sample
from roll.data.task import Task
from roll.data.tokenlog import TokenLog
from roll.rollout.buffer_checkpoint import buffer_state, groups_by_part, samples_by_part, unfinished_groups
from roll.rollout.lifecycle import ENDS, Lifecycle
from roll.rollout.messages import SampleCommand
from roll.scheduler.batch_selection import BatchSelector
from roll.scheduler.filters import Filter
from roll.scheduler.group_table import GroupTable
from roll.scheduler.group_tasks import GroupTasks
from roll.scheduler.policy import Policy, PolicyRunner, SchedulerControl
from roll.scheduler.rollout_pool import RolloutPool
from roll.scheduler.rollout_result import (
    BASELINE,
    RolloutBatch,
    StepCounters,
    baselines,
    raise_if_all_failed,
    reason_kind,
    too_few_reason,
)
from roll.scheduler.task_sampler import BatchPolicy, TaskDraw, TaskSampler

MAX_SKIPS = 100_000
"""Consecutive draws of the task sampler that may be skipped before the run stops with an error."""


class RolloutScheduler:
    """Drives every sample from its task to the batch that trains on it."""

    def __init__(
        self,
        task_sampler: TaskSampler,
        pool: RolloutPool,
        lifecycle: Lifecycle,
        config: RolloutConfig,
        group_filter: Filter,
        *,
        policy: Policy | None = None,
        version: int = 0,
        siblings_needed: int = 2,
        greedy_baseline: bool = False,
        temperatures: Mapping[str, float] | None = None,
    ) -> None:
        """`siblings_needed`: scored samples that a group needs to be trained on: two if the algorithm compares samples of
        a group with each other, else one. `greedy_baseline`: adds a greedy sample to each group, whose reward is the
        baseline. `temperatures`: sampling temperature of the domains that override `rollout.temperature`."""
        self._task_sampler = task_sampler
        self._pool = pool
        self._lifecycle = lifecycle
        self._config = config
        self._group_filter = group_filter
        self._siblings_needed = siblings_needed
        self._greedy_baseline = greedy_baseline
        self._temperatures = temperatures or {}
        self._version = pool.version = version
        self._group_table = GroupTable()
        self._counters = StepCounters()
        self._batch_policy = BatchPolicy()
        self._policy = PolicyRunner(policy, config.policy, SchedulerControl(self, self._batch_selector))
        self._stepping = False
        self._group_tasks = GroupTasks(pool, lifecycle, self._group_judged, self._group_task_ended)
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self._kills: dict[str, float] = {}
        """By task id: how many workers its samples have killed or hung."""
        self._lengths = [0, 0]
        """Samples scored so far, and the sum of their response tokens."""
        self._no_tokens = TokenLog()
        """The log of all samples of the controller: rollout workers have the tokens."""
        self._committed: list[Sample] = []
        """Samples of the last batch, whose tokens are freed when the next one is requested."""
        self.next_group = 0
        """Index of the next group to issue."""

    # A step

    async def next_rollout(self) -> RolloutBatch:
        """Returns the batch of one step. Raises `RunError` if every sample failed."""
        if self._committed:
            self._pool.release_tokens(self._committed)
            self._committed = []
        self._batch_policy = self._task_sampler.begin_step()
        self._stepping = True
        try:
            while True:
                self._fill()
                self._policy.poll()
                chosen = await self._select_groups()
                rollout = await self._take_batch(chosen)
                if rollout is not None:
                    return rollout
        except BaseException:
            await self.close()
            raise
        finally:
            self._stepping = False

    async def finish(self) -> None:
        """Ends the run after its last checkpoint: marks all in-flight groups as dropped in the ledger. Resuming from the
        checkpoint rolls those records back."""
        for group in sorted(self._group_table.waiting, key=lambda group: group.index):
            self._drop(group, "ended: the run stopped before it was trained on")
            if group.epoch >= 0:
                self._task_sampler.requeue(group.task, group.epoch)
        await self.close()

    async def close(self) -> None:
        """Cancels all in-flight groups and has the rollout workers free all tokens. Nothing can be issued afterwards."""
        await self.halt()
        await self._pool.tokens.release()

    async def halt(self) -> None:
        """Cancels the tasks of all open groups and starts no new ones, even if a worker dies. Open groups keep their
        state; ready groups can still be saved."""
        await self._group_tasks.halt(self.open_groups)

    def commit(self, rollout: RolloutBatch, version: int, untrained: Mapping[str, str] | None = None) -> None:
        """Ends a step: this batch was trained on, and the engines serve the result, weights `version`. Records what
        became of the samples, drops groups that are too old and issues new ones. The batch's tokens are freed when the
        next batch is requested. Samples in `untrained` were left out of the update, for the reason given there."""
        self.after_publish(version)
        self.mark_trained(rollout, version, untrained)
        self._committed.extend(rollout.samples)

    def mark_trained(self, rollout: RolloutBatch, version: int, untrained: Mapping[str, str] | None = None) -> None:
        """Records that the update to weights `version` used this batch, and issues new groups. Samples in `untrained`
        were left out of the update and are dropped with the reason given there."""
        reasons = untrained or {}
        for reason, samples in groupby(rollout.trained_samples, lambda sample: reasons.get(sample.id, "")):
            if reason:
                self._lifecycle.move_all(samples, "dropped", reason)
            else:
                self._lifecycle.move_all(samples, "trained", version=version)
        greedy = [group.baseline for group in rollout.kept]
        self._lifecycle.move_all((sample for sample in greedy if sample is not None), "dropped", BASELINE)
        self._group_table.remove_trained(rollout.kept)
        self._fill()

    def requeue_batch(self, rollout: RolloutBatch, reason: str) -> None:
        """Requeues the groups of a batch whose tokens were lost before the update."""
        for group in rollout.kept:
            self._requeue_group(group, reason)
        self._counters.ended = [g for g in rollout.groups if g not in rollout.kept] + self._counters.ended

    def before_publish(self, version: int) -> None:
        """Drops the open and ready groups that will be too old once the engines serve `version`. With
        `staleness_policy: mask` a group stays if it has tokens that are new enough."""
        for group in self._group_table.waiting:
            if stale := self._stale_reason(group, version):
                self._drop(group, stale)

    def _stale_reason(self, group: Group, version: int) -> str:
        """Returns why a group is too old to be trained on at a version, or an empty string. The version of its newest
        tokens is known only for scored samples; without any, a group counts as new with `staleness_policy: mask`."""
        limit, oldest = version - self._config.max_staleness, group.oldest
        if oldest is None or oldest >= limit:
            return ""
        newest = max((s.newest for s in group.scored if s.newest is not None), default=version)
        if self._config.staleness_policy == "mask" and newest >= limit:
            return ""
        return f"stale: {version - oldest} versions old at version {version}"

    def after_publish(self, version: int) -> None:
        """Called when the engines serve this version of the weights: drops groups that are too old, issues new ones."""
        self._version = self._pool.version = version
        self.before_publish(version)  # again, for groups that were issued during the weight sync
        self._fill()

    def worker_lost(self, worker: int, reason: str) -> None:
        """A rollout worker died: requeues the ready groups whose tokens it held. The pool restarts the open groups."""
        for group in list(self._group_table.ready.values()):
            if any(self._pool.tokens.locate(sample) in (worker, None) for sample in group.scored):
                self._requeue_group(group, reason)

    # Commands of policies

    def add(self, task: Task, priority: int = 0) -> Group:
        """Issues a group of a task now, outside the task sampler's order."""
        return self._issue(TaskDraw(task, -1), priority)

    def drop(self, group: Group, reason: str) -> None:
        """Drops a group that is open or ready and issues another one if there is capacity."""
        if group.index in self._group_table.taken:
            raise ValueError(f"group {group.index} is being trained on")
        self._drop(group, reason)
        self._fill()

    def _drop(self, group: Group, reason: str) -> None:
        self._group_tasks.cancel(group)
        self._group_table.drop(group)
        self._record_end(group, reason)
        self._changed.set()

    def drop_sample(self, sample: Sample, reason: str) -> bool:
        """Drops one sample of an open group. Returns False if no rollout worker has the sample."""
        return self._pool.send_command(SampleCommand(sample.id, "drop", reason))

    def end_response(self, sample: Sample, reason: str) -> bool:
        """Ends a response that is being generated; it is scored as it stands. Returns False if no rollout worker has the
        sample."""
        return self._pool.send_command(SampleCommand(sample.id, "end", reason))

    def requeue(self, sample: Sample, reason: str) -> bool:
        """Aborts a response on its engine and requeues it; it resumes from its prefix when it gets a slot again."""
        return self._pool.send_command(SampleCommand(sample.id, "requeue", reason))

    def reprioritise(self, group: Group, priority: int) -> None:
        """Sets a group's priority. Groups with a higher priority get engine slots first."""
        group.priority = priority
        for sample in group.samples:
            sample.priority = priority
        if group.index in self._group_table.open and not self._pool.has_lease(str(group.index)):
            self._group_tasks.start(group, after=self._group_tasks.cancel(group))

    @property
    def open_groups(self) -> list[Group]:
        """Groups with samples that are not judged yet."""
        return list(self._group_table.open.values())

    # Checkpoints

    def state(self) -> dict[str, Any]:
        """The scheduler's state as JSON, without the tokens of the `ready` groups, which `save` writes. The `open` groups
        are issued again on resume."""
        return {
            "order": self._task_sampler.state(),
            "next_group": self.next_group,
            "kills": dict(self._kills),
            "lengths": list(self._lengths),
            **buffer_state(self._group_table.ready_in_order(), self._group_table.not_ready(), self._pool.tokens.locate),
        }

    async def save(self, folder: Path, state: dict[str, Any]) -> None:
        """Has the rollout workers write the tokens of the `ready` groups of `state` into a checkpoint's folder."""
        await self._pool.tokens.save(folder, samples_by_part(state))

    async def restore(self, state: dict[str, Any], tasks: Sequence[Task], folder: Path | None = None) -> None:
        """Resumes from a state and the checkpoint's folder. Ready groups whose tokens can be loaded are ready again. The
        ledger records all other in-flight groups as dropped; those that the task sampler drew are issued again."""
        by_id = {task.id: task for task in tasks}
        self._task_sampler.restore(state["order"])
        self.next_group = state["next_group"]
        self._kills = dict(state["kills"])
        self._lengths = list(state["lengths"])
        parts = groups_by_part(state, by_id)
        if folder is not None:
            await self._pool.tokens.load(folder, parts)
        for group in (group for groups in parts.values() for group in groups):
            if all(self._pool.tokens.locate(sample) is not None for sample in group.scored):
                self._group_table.add_ready(group)
        for unfinished in unfinished_groups(state, self._group_table.ready):
            self._lifecycle.close_unfinished(unfinished.samples, "resumed: its group is issued again")
            if unfinished.epoch >= 0:
                self._task_sampler.requeue(by_id[unfinished.task], unfinished.epoch)

    # Issuing

    def _fill(self) -> None:
        """Issues groups until the in-flight limit is reached. On-policy, only during `next_rollout`."""
        if not self._stepping and not self._config.max_staleness:
            return
        skips = 0
        while self._group_table.in_flight < self._capacity() and self._error is None:
            draw = self._task_sampler.next()
            skip = draw.skip or self._quarantine(draw.task)
            if not skip:
                self._issue(draw, 0)
                skips = 0
                continue
            self._skip(draw, skip)
            skips += 1
            if skips > MAX_SKIPS:
                raise RunError(f"{skips} tasks in a row were skipped; the last reason: {skip}")

    def _capacity(self) -> int:
        """The in-flight limit in groups. Each rejection beyond `max_replacements` lowers it by one, so that it is not
        replaced."""
        wanted = self._config.groups_per_step
        bound = int(wanted * self._config.max_replacements + 1e-9)
        capacity = wanted * (self._config.max_staleness + 1) + int(wanted * self._batch_policy.oversample + 1e-9)
        return capacity - max(0, self._counters.rejected - bound)

    def _issue(self, draw: TaskDraw, priority: int) -> Group:
        index = self.next_group
        self.next_group += 1
        config, temperature = self._config, self._temperature(draw.task)
        samples = [
            Sample(f"{index}.{i}", draw.task, index, temperature, self._no_tokens, priority=priority)
            for i in range(config.group_size)
        ]
        if self._greedy_baseline:
            samples.append(Sample(f"{index}.{config.group_size}", draw.task, index, 0.0, priority=priority, greedy=True))
        group = Group(index, draw.task, samples, draw.epoch, priority, self._version)
        info: dict[str, Any] = {"task": draw.task.id, "group": index, "domain": draw.task.domain}
        if priority:
            info["priority"] = priority
        self._lifecycle.move_all(samples[: config.group_size], "queued", **info)
        self._lifecycle.move_all(samples[config.group_size :], "queued", **info, greedy=True)
        self._group_table.issue(group)
        self._group_tasks.start(group)
        return group

    def _skip(self, draw: TaskDraw, reason: str) -> None:
        """Records in the ledger that a drawn task is skipped."""
        index = self.next_group
        self.next_group += 1
        sample = Sample(f"{index}.0", draw.task, index, self._temperature(draw.task))
        self._lifecycle.move(sample, "queued", task=draw.task.id, group=index, domain=draw.task.domain)
        self._lifecycle.move(sample, "dropped", reason)
        self._counters.count(reason, draw.task.domain)

    def _temperature(self, task: Task) -> float:
        return self._temperatures.get(task.domain, self._config.temperature)

    def _quarantine(self, task: Task) -> str:
        kills, most = self._kills.get(task.id, 0.0), self._config.quarantine_after
        return f"quarantined: it has killed or hung {kills:g} workers" if kills >= most - 1e-6 else ""

    def _group_task_ended(self, error: Exception | None) -> None:
        self._error = self._error or error
        self._changed.set()

    def _requeue_group(self, group: Group, reason: str) -> None:
        group.version = self._version
        self._group_table.reopen(group)
        lost = [sample for sample in group.samples if sample.state != "dropped"]
        self._pool.release_tokens(lost)
        if self._pool.restart_samples(lost, self._lifecycle, reason):
            self._group_tasks.start(group)
        else:
            self._group_table.drop(group)
            self._record_end(group, reason)
        self._changed.set()

    # Filtering

    def _group_judged(self, group: Group) -> None:
        """Moves a group whose samples are all judged to `ready`, or drops it and issues another."""
        scored = group.scored
        if kills := sum(sample.kills for sample in group.samples):
            self._kills[group.task.id] = self._kills.get(group.task.id, 0.0) + kills
        self._task_sampler.on_group_judged(group.task, [s.reward for s in scored], [s.response_tokens for s in scored])
        self._lengths[0] += len(scored)
        self._lengths[1] += sum(sample.response_tokens for sample in scored)
        reason = self._reason_to_drop(group)
        stale = self._stale_reason(group, self._version) if self._config.staleness_policy == "mask" else ""
        if reason is None and not stale:
            self._group_table.finish(group)
        else:
            self._group_table.drop(group)
            self._record_end(group, reason or stale)
            self._counters.rejected += reason is not None
            self._fill()
        self._policy.on_group_judged(group)

    def _reason_to_drop(self, group: Group) -> str | None:
        if len(group.scored) < self._siblings_needed:
            return too_few_reason(self._siblings_needed)
        if group.baseline is not None and group.baseline.state != "scored":
            return "no baseline: the greedy answer could not be judged"
        return self._group_filter(group)

    def _record_end(self, group: Group, reason: str) -> None:
        unfinished = [sample for sample in group.samples if sample.state not in ENDS]
        self._lifecycle.move_all(unfinished, "dropped", reason)
        self._counters.count_group(group, reason)

    # Batch selection

    def _batch_selector(self) -> BatchSelector:
        return BatchSelector(self._group_table, self._config, self._batch_policy, self._version)

    async def _select_groups(self) -> list[Group]:
        """Waits until the batch of the step is complete and returns its groups."""
        late_since_s: float | None = None
        clock = asyncio.get_running_loop()
        while True:
            if self._error is not None:
                raise self._error
            selector = self._batch_selector()
            late = selector.waits_for_late()
            if not self._group_table.open or (selector.has_enough() and not late):
                return selector.pick()
            remaining_s = None
            if late and len(self._group_table.ready) >= self._config.groups_per_step:
                late_since_s = late_since_s or clock.time()
                remaining_s = late_since_s + self._config.staleness_timeout_s - clock.time()
                if remaining_s <= 0:
                    self._drop_late()
                    continue
            await self._wait_for_change(remaining_s)

    async def _wait_for_change(self, limit_s: float | None) -> None:
        """Returns when a group was dropped or its task ended, after `limit_s`, or when the policy is due. The wait is
        bounded because every call that a group waits for has a deadline."""
        self._changed.clear()
        poll_s = self._policy.next_poll_in_s
        try:
            async with asyncio.timeout(min((s for s in (limit_s, poll_s) if s is not None), default=None)):
                await self._changed.wait()
        except TimeoutError:
            pass
        if self._policy.next_poll_in_s == 0:
            self._policy.poll()

    def _drop_late(self) -> None:
        for group in self._batch_selector().late_groups():
            self._drop(group, f"stale: not finished {self._config.staleness_timeout_s:g} s after its step was due")
        self._fill()

    async def _take_batch(self, chosen: list[Group]) -> RolloutBatch | None:
        """The batch of the step. Returns None if tokens of the chosen groups were lost: then they are requeued."""
        self._group_table.take(chosen)
        samples = [sample for group in chosen for sample in group.scored]
        mask_below = self._version - self._config.max_staleness if self._config.staleness_policy == "mask" else 0
        try:
            batch = await self._pool.tokens.batch(samples, mask_below) if samples else None
        except (RemoteError, KeyError) as error:
            for group in chosen:
                self._requeue_group(group, f"tokens lost: {reason_kind(str(error))}")
            return None
        if batch is not None and self._greedy_baseline:
            batch = batch.with_columns(baseline=baselines(chosen))
        self._lifecycle.move_all(samples, "kept")
        if not self._config.max_staleness:
            self._drop_surplus()
        counters, self._counters = self._counters, StepCounters()
        ended = sorted([*counters.ended, *chosen], key=lambda group: group.index)
        raise_if_all_failed(ended)
        return RolloutBatch(
            batch, chosen, ended, dict(counters.reasons), counters.by_domain, self._version, self._length_bias(samples)
        )

    def _drop_surplus(self) -> None:
        """On-policy, drops the groups that a full step does not need and returns their tasks to the sampler."""
        for group in self._group_table.waiting:
            running = group.index in self._group_table.open
            self._drop(group, "cut: the step was full before it ended" if running else "surplus: the step was full")
            if group.epoch >= 0:  # a policy's group has epoch -1: the sampler did not draw it
                (self._task_sampler.requeue_unfinished if running else self._task_sampler.requeue)(
                    group.task, group.epoch
                )

    def _length_bias(self, samples: list[Sample]) -> float:
        count, tokens = self._lengths
        if not samples or not tokens:
            return 0.0
        return sum(sample.response_tokens for sample in samples) / len(samples) / (tokens / count) - 1
