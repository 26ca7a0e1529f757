"""The rollout scheduler: issues groups, keeps those worth training on, replaces the others at once.

There is no batch barrier: a response is judged while others are still generated, a group is filtered the moment its last
sample is judged, and a dropped group's replacement is issued right then. With `max_staleness: k` above 0, groups of the
next k steps are generated while one is trained on.

What always holds:

- *Volume*: at most (k + 1) × groups_per_step groups, and what is oversampled, are charged for: from being issued until
  trained on or dropped.
- *Age*: when a step trains at version v, none of its tokens is older than v - k (with `stale: mask`: none that counts).
- *On-policy* (k = 0, nothing oversampled): groups are issued in the order of their index and each rejection issues
  exactly one more (up to the step's bound), so which groups a step issues, and which it keeps, does not depend on timing.
  With 4 groups wanted and groups 1 and 4 without signal: 0 1 2 3 are issued, 4 replaces 1, 5 replaces 4, and the batch is
  0 2 3 5.
- Every task that was drawn is trained on, dropped with a reason, or drawn again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll.cluster.errors import RemoteError
from roll.config.errors import RunError
from roll.config.schema import RolloutConfig
from roll.data.batch import Batch
from roll.data.sample import Group, Sample
from roll.data.task import Task
from roll.rollout.books import Books
from roll.rollout.buffer import group_of, state_of
from roll.rollout.filters import Filter
from roll.rollout.lifecycle import ENDS, Lifecycle
from roll.rollout.messages import Stop
from roll.rollout.order import Draw, StepShape, TaskOrder
from roll.rollout.pool import RolloutPool

MOST_SKIPS = 100_000
"""Draws in a row that may be skipped."""


@dataclass(frozen=True)
class Rollout:
    """What one step's rollout gave: the batch (None if no group was kept), all groups that ended since the last one, and
    why some were dropped."""

    batch: Batch | None
    kept: list[Group]
    groups: list[Group]
    dropped: dict[str, int]
    version: int = 0
    """Of the weights it will be trained at."""
    length_bias: float = 0.0
    """By how much its responses are longer than all so far, as a share: below 0 where short ones are taken first."""

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group.samples]

    @property
    def trained(self) -> list[Sample]:
        """The samples of the batch."""
        return [sample for group in self.kept for sample in group.samples if sample.state in ("kept", "trained")]

    @property
    def ages(self) -> list[int]:
        """Versions each sample of the batch is behind, by its oldest token."""
        return [self.version - sample.oldest for sample in self.trained if sample.oldest is not None]


@dataclass
class _Tally:
    """What happened since the last step was closed."""

    ended: list[Group] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    rejected: int = 0


class RolloutScheduler:
    def __init__(
        self,
        order: TaskOrder,
        pool: RolloutPool,
        lifecycle: Lifecycle,
        config: RolloutConfig,
        keep: Filter,
        *,
        version: int = 0,
    ) -> None:
        self._order = order
        self._pool = pool
        self._lifecycle = lifecycle
        self._config = config
        self._filter = keep
        self._version = pool.version = version
        self._books = Books()
        self._tally = _Tally()
        self._shape = StepShape()
        self._stepping = False
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """The coroutine of each open group."""
        self._leaving: set[asyncio.Task[None]] = set()
        """Coroutines of groups that were abandoned, as long as their workers are being told."""
        self._closed = False
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self._kills: Counter[str] = Counter()
        """Workers that the samples of a task have killed or hung."""
        self._lengths = [0, 0]
        """Samples judged so far, and their response tokens."""
        self.next_group = 0
        """Index of the next group to issue."""

    # A step

    async def next_rollout(self) -> Rollout:
        """Makes one step's batch. Raises when no sample at all could be judged."""
        self._shape = self._order.begin_step()
        self._stepping = True
        try:
            while True:
                self._fill()
                chosen = await self._chosen()
                rollout = await self._taken(chosen)
                if rollout is not None:
                    return rollout
        except BaseException:
            await self.close()
            raise
        finally:
            self._stepping = False

    async def finish(self) -> None:
        """The run stops here, after its last checkpoint: what is under way is dropped on record, which is taken back by
        whoever goes on from the checkpoint."""
        for group in self._books.waiting:
            self._drop(group, "ended: the run stopped before it was trained on")
            if group.epoch >= 0:
                self._order.give_back(group.task, group.epoch)
        await self.close()

    async def close(self) -> None:
        """Ends everything that is under way, for good, and lets go of all tokens."""
        await self.halt()
        await self._pool.tokens.forget()

    async def halt(self) -> None:
        """Nothing is generated from now on, whatever dies: what is open stays as it is, what is ready can be saved."""
        self._closed = True
        for group in self.open_groups:
            self._abandon(group)
        # waits: they were cancelled
        await asyncio.gather(*self._leaving, return_exceptions=True)

    def trained(self, rollout: Rollout, version: int) -> None:
        """The weights of `version` have been trained on it."""
        for sample in rollout.trained:
            self._lifecycle.move(sample, "trained", version=version)
        self._books.trained(rollout.kept)
        self._fill()

    def give_back(self, rollout: Rollout, reason: str) -> None:
        """Its tokens were lost before it was trained on: its groups run again."""
        for group in rollout.kept:
            self._run_again(group, reason)
        self._tally.ended = [g for g in rollout.groups if g not in rollout.kept] + self._tally.ended

    def before_publish(self, version: int) -> None:
        """Once the engines serve `version`, nothing older than it allows will be trained on: what would be is dropped,
        unless its old tokens are to be masked."""
        limit = version - self._config.max_staleness
        for group in self._books.waiting:
            oldest = group.oldest
            if oldest is None or oldest >= limit:
                continue
            newest = max((s.newest for s in group.scored if s.newest is not None), default=version)
            if self._config.stale != "mask" or newest < limit:
                self._drop(group, f"stale: {version - oldest} versions old at version {version}")

    def published(self, version: int) -> None:
        self._version = self._pool.version = version
        self.before_publish(version)  # again, for what began while the weights were on their way
        self._fill()

    def worker_lost(self, worker: int, reason: str) -> None:
        """A rollout worker died: finished groups whose tokens it had run again. Running ones the pool starts anew."""
        for group in list(self._books.ready.values()):
            if any(self._pool.tokens.home_of(sample) in (worker, None) for sample in group.scored):
                self._run_again(group, reason)

    # Interfering

    def add(self, task: Task, priority: int = 0) -> Group:
        """Issues a group of a task now, whatever the order says."""
        return self._issue(Draw(task, -1), priority)

    def drop(self, group: Group, reason: str) -> None:
        """Ends a group that is under way, wherever it is."""
        if group.index in self._books.taken:
            raise ValueError(f"group {group.index} is being trained on")
        self._drop(group, reason)
        self._fill()

    def _drop(self, group: Group, reason: str) -> None:
        self._abandon(group)
        self._books.drop(group)
        self._record_end(group, reason)
        self._changed.set()

    def stop(self, sample: Sample, reason: str) -> bool:
        """Drops one sample of a running group; False if it is not running."""
        return self._pool.stop(Stop(sample.id, "drop", reason))

    def end(self, sample: Sample, reason: str) -> bool:
        """Ends a response that is being generated, with what it has; False if it is not running."""
        return self._pool.stop(Stop(sample.id, "end", reason))

    def requeue(self, sample: Sample, reason: str) -> bool:
        """Takes a response off its engine; it goes on from its prefix when it has a place again."""
        return self._pool.stop(Stop(sample.id, "requeue", reason))

    def reprioritise(self, group: Group, priority: int) -> None:
        """Groups with a higher priority get their engine first."""
        group.priority = priority
        for sample in group.samples:
            sample.priority = priority
        if group.index in self._books.open and not self._pool.has(str(group.index)):
            self._start(group, after=self._abandon(group))

    @property
    def open_groups(self) -> list[Group]:
        """Groups whose samples are not all judged."""
        return list(self._books.open.values())

    # What a checkpoint needs

    def state(self) -> dict[str, Any]:
        """All that is needed to go on, as JSON, but the tokens of `ready` groups, which `save` writes. Those of which
        something is missing, `open`, are issued again."""
        books, home_of = self._books, self._pool.tokens.home_of
        parts = {group.index: home_of(group.scored[0]) for group in books.ready.values()}
        ready = [state_of(group, part) for group in books.oldest_ready() if (part := parts[group.index]) is not None]
        lost = [group for group in books.ready.values() if parts[group.index] is None]
        unfinished = sorted([*books.open.values(), *books.taken.values(), *lost], key=lambda group: group.index)
        return {
            "order": self._order.state(),
            "next_group": self.next_group,
            "kills": dict(self._kills),
            "lengths": list(self._lengths),
            "open": [
                {
                    "index": group.index,
                    "task": group.task.id,
                    "epoch": group.epoch,
                    "samples": [sample.id for sample in group.samples if sample.state not in ENDS],
                }
                for group in unfinished
            ],
            "ready": ready,
        }

    async def save(self, folder: Path, state: dict[str, Any]) -> None:
        """Writes the tokens of what was ready when `state` was taken, a moment ago, into a checkpoint's folder."""
        parts: dict[int, list[str]] = {}
        for group in state["ready"]:
            parts.setdefault(group["part"], []).extend(sample["id"] for sample in group["samples"])
        await self._pool.tokens.save(folder, parts)

    async def restore(self, state: dict[str, Any], tasks: Sequence[Task], folder: Path | None = None) -> None:
        """Goes on from a state and the checkpoint's folder. Groups whose tokens are not there, or whose task is none of
        these, are closed; those that the order knows are issued again."""
        by_id = {task.id: task for task in tasks}
        self._order.restore(state["order"])
        self.next_group = state["next_group"]
        self._kills = Counter(state["kills"])
        self._lengths = list(state["lengths"])
        parts: dict[int, list[Group]] = {}
        for said in state["ready"]:
            if said["task"] in by_id:
                parts.setdefault(said["part"], []).append(group_of(said, by_id[said["task"]]))
        if folder is not None:
            await self._pool.tokens.load(folder, parts)
        for group in (group for some in parts.values() for group in some):
            if all(self._pool.tokens.home_of(sample) is not None for sample in group.scored):
                self._books.put_back(group)
        lost = [said for said in state["ready"] if said["index"] not in self._books.ready]
        unfinished = [{**said, "samples": [s["id"] for s in said["samples"] if s["state"] not in ENDS]} for said in lost]
        for said in sorted([*state["open"], *unfinished], key=lambda said: int(said["index"])):
            self._lifecycle.close_unfinished(said["samples"], "resumed: its group is issued again")
            if said["epoch"] >= 0:
                self._order.give_back(by_id[said["task"]], said["epoch"])

    # Issuing

    def _fill(self) -> None:
        """Issues groups as long as there is room for them."""
        if not self._stepping and not self._config.max_staleness:
            return
        skips = 0
        while self._books.charged < self._room() and self._error is None:
            draw = self._order.next()
            skip = draw.skip or self._quarantine(draw.task)
            if not skip:
                self._issue(draw, 0)
                skips = 0
                continue
            self._skip(draw, skip)
            skips += 1
            if skips > MOST_SKIPS:
                raise RunError(f"{skips} tasks in a row were skipped; the last reason: {skip}")

    def _room(self) -> int:
        """Groups that may be charged for. Rejections beyond the bound are not replaced."""
        wanted = self._config.groups_per_step
        bound = int(wanted * self._config.max_replacements + 1e-9)
        capacity = wanted * (self._config.max_staleness + 1) + int(wanted * self._shape.oversample + 1e-9)
        return capacity - max(0, self._tally.rejected - bound)

    def _issue(self, draw: Draw, priority: int) -> Group:
        index = self.next_group
        self.next_group += 1
        config = self._config
        samples = [
            Sample(f"{index}.{i}", draw.task, index, config.temperature, priority=priority)
            for i in range(config.group_size)
        ]
        group = Group(index, draw.task, samples, draw.epoch, priority, self._version)
        said: dict[str, Any] = {"task": draw.task.id, "group": index, "domain": draw.task.domain}
        if priority:
            said["priority"] = priority
        for sample in samples:
            self._lifecycle.move(sample, "queued", **said)
        self._books.issue(group)
        self._start(group)
        return group

    def _skip(self, draw: Draw, reason: str) -> None:
        """Puts on record that a task is not tried this time."""
        index = self.next_group
        self.next_group += 1
        sample = Sample(f"{index}.0", draw.task, index, self._config.temperature)
        self._lifecycle.move(sample, "queued", task=draw.task.id, group=index, domain=draw.task.domain)
        self._lifecycle.move(sample, "dropped", reason)
        self._tally.reasons[_kind(reason)] += 1

    def _quarantine(self, task: Task) -> str:
        kills = self._kills[task.id] if self._kills else 0
        return f"quarantined: it has killed or hung {kills} workers" if kills >= self._config.quarantine_after else ""

    def _start(self, group: Group, after: asyncio.Task[None] | None = None) -> None:
        if not self._closed:
            self._tasks[group.index] = asyncio.create_task(self._run(group, after))

    async def _run(self, group: Group, after: asyncio.Task[None] | None) -> None:
        me = asyncio.current_task()
        try:
            if after is not None:
                await asyncio.wait([after])  # waits: it was cancelled
            samples = [sample for sample in group.samples if sample.state == "queued"]
            await self._pool.run(str(group.index), samples, self._lifecycle, priority=group.priority, order=group.index)
            if self._books.open.get(group.index) is group and self._tasks.get(group.index) is me:
                self._judge(group)
        except Exception as error:
            self._error = self._error or error
        finally:
            if self._tasks.get(group.index) is me:
                del self._tasks[group.index]
            self._changed.set()

    def _abandon(self, group: Group) -> asyncio.Task[None] | None:
        """Ends what runs of a group; the task that ends."""
        task = self._tasks.pop(group.index, None)
        if task is not None:
            task.cancel()
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        return task

    def _run_again(self, group: Group, reason: str) -> None:
        group.version = self._version
        self._books.give_back(group)
        lost = [sample for sample in group.samples if sample.state != "dropped"]
        self._pool.let_go(lost)
        if self._pool.start_anew(lost, self._lifecycle, reason):
            self._start(group)
        else:
            self._books.drop(group)
            self._record_end(group, reason)
        self._changed.set()

    # Judging

    def _judge(self, group: Group) -> None:
        """Keeps a group whose samples are all judged, or drops it and issues another."""
        scored = group.scored
        self._kills.update({group.task.id: kills} if (kills := sum(s.kills for s in group.samples)) else {})
        self._order.judged(group.task, [s.reward for s in scored], [s.response_tokens for s in scored])
        self._lengths[0] += len(scored)
        self._lengths[1] += sum(sample.response_tokens for sample in scored)
        reason = self._filter(group) if len(scored) > 1 else "fewer than two samples could be judged"
        if reason is None:
            self._books.finish(group)
            return
        self._books.drop(group)
        self._record_end(group, reason)
        self._tally.rejected += 1
        self._fill()

    def _record_end(self, group: Group, reason: str) -> None:
        for sample in group.samples:
            if sample.state not in ENDS:
                self._lifecycle.move(sample, "dropped", reason)
        self._tally.ended.append(group)
        self._tally.reasons[_kind(reason)] += 1

    # Closing

    async def _chosen(self) -> list[Group]:
        """The groups of the step, once it can be closed."""
        late_s: float | None = None
        clock = asyncio.get_running_loop()
        while True:
            if self._error is not None:
                raise self._error
            late = self._waits_for_late()
            if not self._books.open or (self._enough() and not late):
                return self._pick()
            left_s = None
            if late and len(self._books.ready) >= self._config.groups_per_step:
                late_s = late_s or clock.time()
                left_s = late_s + self._config.stale_wait_s - clock.time()
                if left_s <= 0:
                    self._drop_late()
                    continue
            await self._news(left_s)

    async def _news(self, limit_s: float | None) -> None:
        """Returns when a group has ended, or after a while. What a group waits for has deadlines of its own."""
        self._changed.clear()
        try:
            async with asyncio.timeout(limit_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _waits_for_late(self) -> bool:
        """Whether an open group must be of this step, because it will be too old for the next."""
        if not self._config.max_staleness or self._config.stale != "wait":
            return False
        oldest = self._books.oldest_open_version
        return oldest is not None and oldest <= self._version - self._config.max_staleness

    def _drop_late(self) -> None:
        limit = self._version - self._config.max_staleness
        for group in list(self._books.open.values()):
            if group.version <= limit:
                self._drop(group, f"stale: not finished {self._config.stale_wait_s:g} s after its step was due")
        self._fill()

    def _enough(self) -> bool:
        wanted = self._config.groups_per_step
        waits = self._shape.cut == "in_order" and (self._config.stale == "wait" or not self._config.max_staleness)
        return (self._books.ready_before_any_open() if waits else len(self._books.ready)) >= wanted

    def _pick(self) -> list[Group]:
        """Those that would get too old first, then by the step's cut."""
        groups = self._books.oldest_ready() if self._shape.cut == "in_order" else list(self._books.ready.values())
        limit = self._version - self._config.max_staleness
        groups.sort(key=lambda group: (old := group.oldest) is not None and old > limit)
        return sorted(groups[: self._config.groups_per_step], key=lambda group: group.index)

    async def _taken(self, chosen: list[Group]) -> Rollout | None:
        """The step's rollout; None if tokens were lost meanwhile, so that some groups run again."""
        self._books.take(chosen)
        samples = [sample for group in chosen for sample in group.scored]
        mask_below = self._version - self._config.max_staleness if self._config.stale == "mask" else 0
        try:
            batch = await self._pool.tokens.batch(samples, mask_below) if samples else None
        except (RemoteError, KeyError) as error:
            for group in chosen:
                self._run_again(group, f"tokens lost: {_kind(str(error))}")
            return None
        for sample in samples:
            self._lifecycle.move(sample, "kept")
        if not self._config.max_staleness:
            self._cut_the_rest()
        tally, self._tally = self._tally, _Tally()
        ended = sorted([*tally.ended, *chosen], key=lambda group: group.index)
        self._refuse_total_failure(ended)
        return Rollout(batch, chosen, ended, dict(tally.reasons), self._version, self._bias(samples))

    def _cut_the_rest(self) -> None:
        """On-policy, what a full step does not need is of no use: its tasks come again."""
        for group in self._books.waiting:
            running = group.index in self._books.open
            self._drop(group, "cut: the step was full before it ended" if running else "surplus: the step was full")
            if group.epoch >= 0:  # else the order knows nothing of it
                (self._order.cut if running else self._order.give_back)(group.task, group.epoch)

    def _bias(self, samples: list[Sample]) -> float:
        count, tokens = self._lengths
        if not samples or not tokens:
            return 0.0
        return sum(sample.response_tokens for sample in samples) / len(samples) / (tokens / count) - 1

    def _refuse_total_failure(self, groups: list[Group]) -> None:
        samples = [sample for group in groups for sample in group.samples]
        reasons = [sample.reason for sample in samples if sample.state == "failed"]
        if len(reasons) < len(samples) or not samples:
            return
        commonest = max(set(reasons), key=reasons.count)
        raise RunError(
            f"all {len(samples)} samples of the step failed, so there is nothing to train on; "
            f"the reason of {reasons.count(commonest)} of them: {commonest}"
        )


def _kind(reason: str) -> str:
    """A reason without what differs from group to group."""
    return (
        reason.partition(":")[0] if reason.startswith(("stale", "mean reward", "solve rate", "quarantined")) else reason
    )
