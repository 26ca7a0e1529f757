"""Task orders: which task the next group is of, and how a step is filled and closed.

An order is asked for draws (`next`), told what became of them (`give_back`, `cut`, `judged`) and saved with the run. It
never waits, never looks at a clock and never rolls dice that its seed does not fix: the same calls give the same draws.

`EpochSampler` is the ground: every task exactly once an epoch. Policies are wrappers around it, each one a class that
changes a little and hands on the rest. What always holds, through every wrapper: no draw of the ground is lost or
doubled. Each is given out once, and once more for every time it came back.
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
    """The next group's task. Task and epoch together name a draw."""

    task: Task
    epoch: int
    skip: str = ""
    """Not empty: it is recorded as dropped for this reason, and nothing is generated."""
    again: bool = False
    """It was given out before and came back: it goes first, and is not skipped."""


@dataclass(frozen=True)
class BatchPolicy:
    """How a step is filled and closed."""

    oversample: float = 0.0
    """Groups issued beyond the step's need, as a share of it."""
    cut: Literal["in_order", "first"] = "in_order"
    """Which groups make the batch: the oldest issued, or the first to finish."""


class TaskSampler(Protocol):
    """Which task is next. Draws never end.

    `epoch` says which draw of a task is meant; without it, it is the task's newest one that is not already waiting. With
    more groups in flight than there are tasks, a task has several, and only the epoch tells them apart.
    """

    def begin_step(self) -> BatchPolicy: ...

    def next(self) -> TaskDraw: ...

    def give_back(self, task: Task, epoch: int | None = None) -> None:
        """It was issued, and neither trained on nor dropped for good: it comes again before all new ones."""

    def cut(self, task: Task, epoch: int | None = None) -> None:
        """It was still running when its step was closed by the first to finish. It is the order's to bring it again."""

    def judged(self, task: Task, rewards: Sequence[float], tokens: Sequence[int]) -> None:
        """A group of it was judged: reward and response length of each sample."""

    def state(self) -> dict[str, Any]:
        """As JSON; an order of the same tasks and settings that restores it goes on with the same draws."""

    def restore(self, state: dict[str, Any]) -> None: ...


class BaseSampler(TaskSampler, Protocol):
    """An order that others can be built on."""

    def drawn(self, id: str) -> TaskDraw:
        """The newest draw of the task with that id that is not waiting to come again. It finds tasks of a saved state."""


class EpochSampler:
    """Every task once an epoch, in a fresh order each time; by domain if they have weights.

    Without weights all tasks are one pool. With weights every domain is a pool with epochs of its own, and after n draws
    a domain of share w has had n·w of them, rounded down or up: of `{math: 3, code: 1}` come math, math, code, math and
    again. What comes back goes first, in the order it came, and takes no turn of its domain's: it had one.

    The epoch of a task's last draw needs no memory: it is the pool's, or the one before if this epoch is not there yet.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        seed: int,
        weights: Mapping[str, float] | None = None,
        shape: BatchPolicy | None = None,
    ) -> None:
        self._shape = shape or BatchPolicy()
        self._weights = _whole(weights) if weights else {"": 1}
        members = _by_domain(tasks, weights) if weights else {"": tasks}
        self._pools = {name: _Pool(members[name], f"{seed}/tasks/{name}".rstrip("/")) for name in self._weights}
        self._at = {task.id: (pool, index) for pool in self._pools.values() for index, task in enumerate(pool.tasks)}
        self._returned: OrderedDict[tuple[str, int], TaskDraw] = OrderedDict()
        self._tasks = f"{len(tasks)} tasks, {hashlib.sha256(json.dumps(list(self._at)).encode()).hexdigest()[:16]}"

    def begin_step(self) -> BatchPolicy:
        return self._shape

    def next(self) -> TaskDraw:
        if self._returned:
            return self._returned.popitem(last=False)[1]
        return self._pools[self._turn()].next()

    def give_back(self, task: Task, epoch: int | None = None) -> None:
        draw = self.drawn(task.id) if epoch is None else TaskDraw(task, epoch)
        assert draw.epoch >= 0, f"{task.id} came back, but was not drawn"
        assert (task.id, draw.epoch) not in self._returned, f"{task.id} of epoch {draw.epoch} came back twice"
        self._returned[task.id, draw.epoch] = replace(draw, again=True)

    def cut(self, task: Task, epoch: int | None = None) -> None:
        self.give_back(task, epoch)

    def judged(self, task: Task, rewards: Sequence[float], tokens: Sequence[int]) -> None:
        """Of no consequence here."""

    def drawn(self, id: str) -> TaskDraw:
        pool, index = self._at[id]
        epoch = pool.epoch_of(index)
        while (id, epoch) in self._returned:
            epoch -= 1
        return TaskDraw(pool.tasks[index], epoch)

    def state(self) -> dict[str, Any]:
        drawn = {name: pool.drawn for name, pool in self._pools.items()}
        return {"tasks": self._tasks, "drawn": drawn, "returned": [list(key) for key in self._returned]}

    def restore(self, state: dict[str, Any]) -> None:
        if state["tasks"] != self._tasks:
            raise UserError(
                f"the tasks are others than when the run was saved (then {state['tasks']}, now {self._tasks}): "
                "a run goes on with the tasks it began with; write run.dir=OTHER to start one with these"
            )
        for name, pool in self._pools.items():
            pool.drawn = state["drawn"][name]
        self._returned.clear()
        for id, epoch in state["returned"]:
            pool, index = self._at[id]
            self.give_back(pool.tasks[index], epoch)

    def _turn(self) -> str:
        """The pool whose turn it is. Draw j of a pool of share w falls between (j - 1)/w and j/w: of the pools that may
        have a draw now, the one that must have it soonest. (Always taking the one furthest behind its share does not do:
        with weights 25, 23, 11, 7, 1, 1, 1 that ends up more than a draw off.)"""
        drawn = {name: pool.drawn for name, pool in self._pools.items()}
        whole, turn = sum(self._weights.values()), sum(drawn.values()) + 1
        ready = [name for name, weight in self._weights.items() if drawn[name] * whole < turn * weight]
        return min(ready, key=lambda name: -(-(drawn[name] + 1) * whole // self._weights[name]))


class _Pool:
    """Tasks in a fresh order every epoch. Draw n is number n % len of epoch n // len."""

    def __init__(self, tasks: Sequence[Task], seed: str) -> None:
        self.tasks = tasks
        self.drawn = 0
        self._seed = seed
        self._shuffled = -1
        self._order: list[int] = []
        self._rank: list[int] = []

    def next(self) -> TaskDraw:
        epoch, position = divmod(self.drawn, len(self.tasks))
        self._shuffle(epoch)
        self.drawn += 1
        return TaskDraw(self.tasks[self._order[position]], epoch)

    def epoch_of(self, index: int) -> int:
        """When the task with that index was drawn last; -1 if it was not."""
        epoch, position = divmod(self.drawn, len(self.tasks))
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


def _whole(weights: Mapping[str, float]) -> dict[str, int]:
    """The same proportions in whole numbers (what is written 0.1 is a tenth), in an order that is always the same."""
    for domain, weight in weights.items():
        if not (math.isfinite(weight) and weight > 0):
            raise UserError(f"tasks.weights.{domain} is {weight}: write a number above 0")
    shares = {domain: Fraction(str(weight)) for domain, weight in sorted(weights.items())}
    scale = math.lcm(*(share.denominator for share in shares.values()))
    return {domain: int(share * scale) for domain, share in shares.items()}


def _by_domain(tasks: Sequence[Task], weights: Mapping[str, float]) -> dict[str, list[Task]]:
    """Tasks of each domain; the weights must be of exactly these."""
    have: dict[str, list[Task]] = {}
    for task in tasks:
        have.setdefault(task.domain, []).append(task)
    if unknown := [domain for domain in weights if domain not in have]:
        raise UserError(
            f"tasks.weights names {_listed(unknown)}, but no task is of that domain: the tasks are of {_listed(have)}"
        )
    if missing := [domain for domain in have if domain not in weights]:
        raise UserError(
            f"tasks.weights says nothing of {_listed(missing)}, of which there are "
            f"{sum(len(have[domain]) for domain in missing)} tasks: write a weight for every domain"
        )
    return have


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(repr(name) for name in names)


class SamplerWrapper:
    """An order around another. It hands everything on; a policy overrides what it changes.

    What comes back (`again`) and what is skipped (`skip`) passes through it as it is, and at once.
    """

    def __init__(self, base: BaseSampler) -> None:
        self.base = base

    def begin_step(self) -> BatchPolicy:
        return self.base.begin_step()

    def next(self) -> TaskDraw:
        return self.base.next()

    def give_back(self, task: Task, epoch: int | None = None) -> None:
        self.base.give_back(task, epoch)

    def cut(self, task: Task, epoch: int | None = None) -> None:
        self.base.cut(task, epoch)

    def judged(self, task: Task, rewards: Sequence[float], tokens: Sequence[int]) -> None:
        self.base.judged(task, rewards, tokens)

    def drawn(self, id: str) -> TaskDraw:
        return self.base.drawn(id)

    def state(self) -> dict[str, Any]:
        return {"base": self.base.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.base.restore(state["base"])


class SolveRateSampler(SamplerWrapper):
    """Skips most visits to tasks that were always, or never, solved of late.

    A visit counts as solved if its group's mean reward is `high` or more, as failed if it is `low` or less. After n such
    visits in a row, all of one kind, the next is skipped with probability `most`·(1 - `decay`^n): 0.38, 0.56, 0.66 … and
    never more than 0.75, so every task comes back, and one visit in between puts it back to 0. Whether a visit is skipped
    depends on the seed, the task and the epoch alone.

    What is judged counts from the next step on: draws do not depend on the order in which groups of a step finish.
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
        self._seen: dict[str, tuple[float, int]] = {}  # rate, visits in a row: solved above 0, failed below
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
        if draw.again or draw.skip or self._coin(draw) >= self._most * (1 - self._decay ** abs(streak)):
            return draw
        return replace(draw, skip=f"solve rate {float(streak > 0):.2f}: nothing to learn from it now")

    def judged(self, task: Task, rewards: Sequence[float], tokens: Sequence[int]) -> None:
        if rewards:
            self._new_results.append((task.id, fmean(rewards)))
        super().judged(task, rewards, tokens)

    def rates(self) -> dict[str, float]:
        """Solve rate of every task judged before this step, older visits counting less; 0 is `low`, 1 is `high`."""
        return {id: rate for id, (rate, _) in self._seen.items()}

    def state(self) -> dict[str, Any]:
        seen = {id: list(record) for id, record in self._seen.items()}
        return {**super().state(), "seen": seen, "news": [list(news) for news in self._new_results]}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._seen = {id: (rate, streak) for id, (rate, streak) in state["seen"].items()}
        self._new_results = [(id, mean) for id, mean in state["news"]]

    def _coin(self, draw: TaskDraw) -> float:
        """Between 0 and 1, evenly."""
        text = f"{self._seed}/solve_rate/{draw.epoch}/{draw.task.id}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest()) / 2**56
