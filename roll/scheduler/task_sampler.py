"""Task samplers: which task the next group gets, and how the batch of a step is filled and selected.

The scheduler requests draws (`next`), reports their outcome (`requeue`, `requeue_unfinished`, `on_group_judged`), and
saves the sampler's state with the run. A sampler never waits, never reads a clock and has no randomness beyond its
seed: the same calls give the same draws.

`EpochSampler` is the base: every task exactly once per epoch. Other samplers are wrappers around it; each class changes
one aspect and passes all other calls on. Invariant, through every wrapper: no draw of the base is lost or duplicated.
Each is returned once, and once more for every time it was requeued.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from statistics import fmean
from typing import Any, Literal, Protocol

from roll.config.errors import UserError
from roll.data.task import Task


@dataclass(frozen=True)
class TaskDraw:
    """The next group's task. Task and epoch together identify a draw."""

    task: Task
    epoch: int
    skip: str = ""
    """If not empty, the ledger records the task as dropped for this reason, and nothing is generated."""
    again: bool = False
    """The draw was returned before and requeued: it comes before new draws and is not skipped."""


@dataclass(frozen=True)
class BatchPolicy:
    """How the batch of a step is filled and selected."""

    oversample: float = 0.0
    """Groups issued beyond `groups_per_step`, as a share of it."""
    batch_selection: Literal["in_order", "first_finished"] = "in_order"
    """Which groups form the batch: the oldest issued, or the first to finish."""


class TaskSampler(Protocol):
    """Chooses the next task; draws never end.

    `epoch` identifies which draw of a task is meant; by default the task's newest one that is not already requeued.
    With more groups in flight than tasks, a task has several draws, and only the epoch distinguishes them.
    """

    def begin_step(self) -> BatchPolicy: ...

    def next(self) -> TaskDraw: ...

    def requeue(self, task: Task, epoch: int | None = None) -> None:
        """Returns a draw that was issued but neither trained on nor finally dropped; it comes again before new draws."""

    def requeue_unfinished(self, task: Task, epoch: int | None = None) -> None:
        """Returns a draw whose group still ran when its step was full; the sampler decides when it comes again."""

    def on_group_judged(self, task: Task, rewards: Sequence[float], tokens: Sequence[int]) -> None:
        """Reports the reward and response length of each scored sample of a judged group."""

    def state(self) -> dict[str, Any]:
        """The state as JSON; a sampler with the same tasks and settings that restores it makes the same draws."""

    def restore(self, state: dict[str, Any]) -> None: ...


class BaseSampler(TaskSampler, Protocol):
    """A task sampler that can be wrapped."""

    def last_draw(self, id: str) -> TaskDraw:
        """The newest draw of the task with that id that is not requeued. Also resolves task ids of a saved state."""


class EpochSampler:
    """Every task once per epoch, shuffled again in each epoch; by domain if domains have weights.

    Without weights all tasks are one pool. With weights every domain is a pool with its own epochs, and after n draws a
    domain of share w has had n·w of them, rounded down or up: `{math: 3, code: 1}` repeats math, math, code, math. Draws
    that were requeued come first, in the order they were requeued, and do not count for their domain again.

    The epoch of a task's last draw is not stored: it is the pool's epoch, or the one before if the task is still to come
    in this epoch.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        seed: int,
        weights: Mapping[str, float] | None = None,
        batch_policy: BatchPolicy | None = None,
    ) -> None:
        self._batch_policy = batch_policy or BatchPolicy()
        self._weights = _integer_weights(weights) if weights else {"": 1}
        members = _by_domain(tasks, weights) if weights else {"": tasks}
        self._pools = {name: _Pool(members[name], f"{seed}/tasks/{name}".rstrip("/")) for name in self._weights}
        self._positions = {
            task.id: (pool, index) for pool in self._pools.values() for index, task in enumerate(pool.tasks)
        }
        self._returned: OrderedDict[tuple[str, int], TaskDraw] = OrderedDict()
        self._tasks = f"{len(tasks)} tasks, {hashlib.sha256(json.dumps(list(self._positions)).encode()).hexdigest()[:16]}"

    def begin_step(self) -> BatchPolicy:
        return self._batch_policy

    def next(self) -> TaskDraw:
        if self._returned:
            return self._returned.popitem(last=False)[1]
        return self._pools[self._next_pool()].next()

    def requeue(self, task: Task, epoch: int | None = None) -> None:
        draw = self.last_draw(task.id) if epoch is None else TaskDraw(task, epoch)
        assert draw.epoch >= 0, f"{task.id} was requeued, but was not drawn"
        assert (task.id, draw.epoch) not in self._returned, f"{task.id} of epoch {draw.epoch} was requeued twice"
        self._returned[task.id, draw.epoch] = replace(draw, again=True)

    def requeue_unfinished(self, task: Task, epoch: int | None = None) -> None:
        self.requeue(task, epoch)

    def on_group_judged(self, task: Task, rewards: Sequence[float], tokens: Sequence[int]) -> None:
        """Has no effect on this sampler."""

    def last_draw(self, id: str) -> TaskDraw:
        pool, index = self._positions[id]
        epoch = pool.epoch_of(index)
        while (id, epoch) in self._returned:
            epoch -= 1
        return TaskDraw(pool.tasks[index], epoch)

    def state(self) -> dict[str, Any]:
        draws = {name: pool.draws for name, pool in self._pools.items()}
        return {"tasks": self._tasks, "drawn": draws, "returned": [list(key) for key in self._returned]}

    def restore(self, state: dict[str, Any]) -> None:
        if state["tasks"] != self._tasks:
            raise UserError(
                f"the tasks differ from those of the saved run (then {state['tasks']}, now {self._tasks}): "
                "a run continues with the tasks it began with; write run.dir=OTHER to start one with these"
            )
        for name, pool in self._pools.items():
            pool.draws = state["drawn"][name]
        self._returned.clear()
        for id, epoch in state["returned"]:
            pool, index = self._positions[id]
            self.requeue(pool.tasks[index], epoch)

    def _next_pool(self) -> str:
        """The pool of the next draw. Draw j of a pool of share w must be between (j - 1)/w and j/w: of the pools that may
        draw now, the one with the earliest deadline. (Always choosing the pool furthest behind its share is not enough:
        with weights 25, 23, 11, 7, 1, 1, 1 it ends up more than one draw off.)"""
        draws = {name: pool.draws for name, pool in self._pools.items()}
        total, number = sum(self._weights.values()), sum(draws.values()) + 1
        ready = [name for name, weight in self._weights.items() if draws[name] * total < number * weight]
        return min(ready, key=lambda name: -(-(draws[name] + 1) * total // self._weights[name]))


class _Pool:
    """Tasks in a new shuffled order every epoch. Draw n is number n % len of epoch n // len."""

    def __init__(self, tasks: Sequence[Task], seed: str) -> None:
        self.tasks = tasks
        self.draws = 0
        self._seed = seed
        self._shuffled = -1
        self._order: list[int] = []
        self._rank: list[int] = []

    def next(self) -> TaskDraw:
        epoch, position = divmod(self.draws, len(self.tasks))
        self._shuffle(epoch)
        self.draws += 1
        return TaskDraw(self.tasks[self._order[position]], epoch)

    def epoch_of(self, index: int) -> int:
        """The epoch of the last draw of the task with that index; -1 if there was none."""
        epoch, position = divmod(self.draws, len(self.tasks))
        self._shuffle(epoch)
        return epoch if self._rank[index] < position else epoch - 1

    def _shuffle(self, epoch: int) -> None:
        if epoch == self._shuffled:
            return
        self._shuffled = epoch
        self._order = list(range(len(self.tasks)))
        random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        self._rank = [0] * len(self.tasks)
        for position, index in enumerate(self._order):
            self._rank[index] = position


def _integer_weights(weights: Mapping[str, float]) -> dict[str, int]:
    """The same proportions as integers (0.1 is exactly a tenth), sorted by domain."""
    for domain, weight in weights.items():
        if not (math.isfinite(weight) and weight > 0):
            raise UserError(f"tasks.domain_weights.{domain} is {weight}: write a number above 0")
    shares = {domain: Fraction(str(weight)) for domain, weight in sorted(weights.items())}
    scale = math.lcm(*(share.denominator for share in shares.values()))
    return {domain: int(share * scale) for domain, share in shares.items()}


def _by_domain(tasks: Sequence[Task], weights: Mapping[str, float]) -> dict[str, list[Task]]:
    """Tasks by domain; raises `UserError` unless the weights name exactly these domains."""
    have: dict[str, list[Task]] = {}
    for task in tasks:
        have.setdefault(task.domain, []).append(task)
    if unknown := [domain for domain in weights if domain not in have]:
        raise UserError(
            f"tasks.domain_weights names {_listed(unknown)}, but no task is of that domain: the tasks are of "
            f"{_listed(have)}"
        )
    if missing := [domain for domain in have if domain not in weights]:
        raise UserError(
            f"tasks.domain_weights has no entry for {_listed(missing)}, of which there are "
            f"{sum(len(have[domain]) for domain in missing)} tasks: write a weight for every domain"
        )
    return have


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(repr(name) for name in names)


class SamplerWrapper:
    """A task sampler around another. It passes every call on; a subclass overrides what it changes.

    A subclass must return draws with `again` or `skip` set unchanged and at once.
    """

    def __init__(self, base: BaseSampler) -> None:
        self.base = base

    def begin_step(self) -> BatchPolicy:
        return self.base.begin_step()

    def next(self) -> TaskDraw:
        return self.base.next()

    def requeue(self, task: Task, epoch: int | None = None) -> None:
        self.base.requeue(task, epoch)

    def requeue_unfinished(self, task: Task, epoch: int | None = None) -> None:
        self.base.requeue_unfinished(task, epoch)

    def on_group_judged(self, task: Task, rewards: Sequence[float], tokens: Sequence[int]) -> None:
        self.base.on_group_judged(task, rewards, tokens)

    def last_draw(self, id: str) -> TaskDraw:
        return self.base.last_draw(id)

    def state(self) -> dict[str, Any]:
        return {"base": self.base.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.base.restore(state["base"])


class SolveRateSampler(SamplerWrapper):
    """Skips most draws of tasks that were recently always, or never, solved.

    A draw counts as solved if its group's mean reward is `high` or more, as failed if it is `low` or less. After n such
    draws in a row, all of one kind, the next is skipped with probability `most`·(1 - `decay`^n): 0.38, 0.56, 0.66 … and
    never more than 0.75, so every task comes again; a draw between `low` and `high` resets n to 0. Whether a draw is
    skipped depends only on the seed, the task, the epoch and n.

    Results take effect at the next step: draws do not depend on the order in which groups of a step finish.
    """

    def __init__(
        self, base: BaseSampler, seed: int, low: float = 0.0, high: float = 1.0, most: float = 0.75, decay: float = 0.5
    ) -> None:
        super().__init__(base)
        assert low < high, f"a group is failed at {low} and solved at {high}"
        assert 0 <= most < 1, f"a task skipped with probability {most} would never come back"
        self._seed = seed
        self._low, self._high = low, high
        self._most, self._decay = most, decay
        self._seen: dict[str, tuple[float, int]] = {}  # solve rate, streak: positive if solved, negative if failed
        self._new_results: list[tuple[str, float]] = []

    def begin_step(self) -> BatchPolicy:
        for id, mean in sorted(self._new_results):
            share = min(max((mean - self._low) / (self._high - self._low), 0.0), 1.0)
            kind = int(share == 1) - int(share == 0)
            rate, streak = self._seen.get(id, (share, 0))
            rate = rate * self._decay + share * (1 - self._decay)
            self._seen[id] = (rate, streak + kind if streak * kind > 0 else kind)
        self._new_results.clear()
        return super().begin_step()

    def next(self) -> TaskDraw:
        draw = self.base.next()
        _, streak = self._seen.get(draw.task.id, (0.0, 0))
        if draw.again or draw.skip or self._uniform(draw) >= self._most * (1 - self._decay ** abs(streak)):
            return draw
        return replace(draw, skip=f"solve rate {float(streak > 0):.2f}: nothing to learn from it now")

    def on_group_judged(self, task: Task, rewards: Sequence[float], tokens: Sequence[int]) -> None:
        if rewards:
            self._new_results.append((task.id, fmean(rewards)))
        super().on_group_judged(task, rewards, tokens)

    def rates(self) -> dict[str, float]:
        """Exponentially weighted solve rate of every task judged before this step; 0 is `low`, 1 is `high`."""
        return {id: rate for id, (rate, _) in self._seen.items()}

    def state(self) -> dict[str, Any]:
        seen = {id: list(record) for id, record in self._seen.items()}
        return {**super().state(), "seen": seen, "news": [list(entry) for entry in self._new_results]}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._seen = {id: (rate, streak) for id, (rate, streak) in state["seen"].items()}
        self._new_results = [(id, mean) for id, mean in state["news"]]

    def _uniform(self, draw: TaskDraw) -> float:
        """A pseudo-random number, uniform between 0 and 1."""
        text = f"{self._seed}/solve_rate/{draw.epoch}/{draw.task.id}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest()) / 2**56
