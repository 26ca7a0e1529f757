"""Long-tail scheduling: task samplers that reduce the time a step waits for its longest responses.

A step ends with its slowest group. `LongestFirst` starts long groups first, so that short ones fill the remaining slots;
`TailBatching` closes steps early and collects the groups that ran long into steps of their own. `make_task_sampler`
creates the sampler that the config names.
"""

from __future__ import annotations

import inspect
import os
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from roll.config.errors import UserError
from roll.config.registry import Registry
from roll.config.rollout import RolloutConfig
from roll.data.task import Task
from roll.scheduler.task_sampler import (
    BaseSampler,
    BatchPolicy,
    EpochSampler,
    SamplerWrapper,
    SolveRateSampler,
    TaskDraw,
    TaskSampler,
)


class LongestFirst(SamplerWrapper):
    """Returns, of the next `window` draws, the one with the longest expected response.

    The expected length of a task is the mean length of its last judged group; for an unknown task, the mean of all tasks.
    Ties keep their order. Invariant: no draw is overtaken more than `window` times. Draw n of the base is returned as
    number n - window + 1 at the earliest and n + window at the latest.

    With a window of 3, draws of 10, 80, 20, 50, 40, 30, 60 … tokens are returned as 80, 50, 40, 10, 60, 20 …: the 10
    after three others have overtaken it, and likewise the 20.

    Observed lengths take effect at the next step: draws do not depend on the order in which groups of a step finish.
    """

    def __init__(self, base: BaseSampler, window: int) -> None:
        super().__init__(base)
        assert window >= 1, f"a window of {window} draws"
        self._window = window
        self._waiting: deque[tuple[int, TaskDraw]] = deque()  # position in the base's order, draw; oldest first
        self._drawn_count = 0
        self._returned_count = 0
        self._tokens: dict[str, int] = {}
        self._total = 0
        self._new_lengths: list[tuple[str, int]] = []

    def begin_step(self) -> BatchPolicy:
        for id, tokens in sorted(self._new_lengths):
            self._total += tokens - self._tokens.get(id, 0)
            self._tokens[id] = tokens
        self._new_lengths.clear()
        return super().begin_step()

    def next(self) -> TaskDraw:
        while len(self._waiting) < self._window:
            draw = self.base.next()
            if draw.again or draw.skip:
                return draw
            self._waiting.append((self._drawn_count, draw))
            self._drawn_count += 1
        chosen = 0
        if self._returned_count - self._waiting[0][0] < self._window:  # surplus draws have overtaken it
            chosen = self._longest()
        draw = self._waiting[chosen][1]
        del self._waiting[chosen]
        self._returned_count += 1
        return draw

    def on_group_judged(self, task: Task, rewards: Sequence[float], tokens: Sequence[int]) -> None:
        if tokens:
            self._new_lengths.append((task.id, round(sum(tokens) / len(tokens))))
        super().on_group_judged(task, rewards, tokens)

    def state(self) -> dict[str, Any]:
        return {
            **super().state(),
            "waiting": [[position, draw.task.id, draw.epoch] for position, draw in self._waiting],
            "taken": self._drawn_count,
            "given": self._returned_count,
            "tokens": dict(self._tokens),
            "news": [list(entry) for entry in self._new_lengths],
        }

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._waiting = deque(
            (position, TaskDraw(self.last_draw(id).task, epoch)) for position, id, epoch in state["waiting"]
        )
        self._drawn_count, self._returned_count = state["taken"], state["given"]
        self._tokens = dict(state["tokens"])
        self._total = sum(self._tokens.values())
        self._new_lengths = [(id, tokens) for id, tokens in state["news"]]

    def _longest(self) -> int:
        mean = self._total / max(len(self._tokens), 1)
        expected = [self._tokens.get(draw.task.id, mean) for _, draw in self._waiting]
        return expected.index(max(expected))


class TailBatching(SamplerWrapper):
    """Short rounds, which end with the first groups to finish, and tail rounds of the groups that were cut.

    A short round issues `oversample` more groups than it needs; groups that still run when enough have finished are cut
    and collected. Once `groups_per_step` are collected, the next step is a tail round: it starts with exactly those, the
    longest waiting first, and waits for all of them. So long responses are trained on too, but later and together.

    Invariants: a draw that was cut is issued again in a tail round (as long as short rounds keep cutting), and a tail
    round cuts none. With 4 groups per step and 1 cut in each short round, every fifth step is a tail round.
    """

    def __init__(self, base: BaseSampler, groups_per_step: int, oversample: float) -> None:
        super().__init__(base)
        self._groups = groups_per_step
        self._oversample = oversample
        self._deferred: deque[TaskDraw] = deque()
        self._remaining = 0  # draws left in the current tail round

    def begin_step(self) -> BatchPolicy:
        super().begin_step()
        self._remaining = self._groups if len(self._deferred) >= self._groups else 0
        return BatchPolicy() if self._remaining else BatchPolicy(self._oversample, "first_finished")

    def next(self) -> TaskDraw:
        if not self._remaining:
            return super().next()
        self._remaining -= 1
        return self._deferred.popleft()

    def requeue_unfinished(self, task: Task, epoch: int | None = None) -> None:
        self._deferred.append(TaskDraw(task, self.last_draw(task.id).epoch if epoch is None else epoch, again=True))

    def state(self) -> dict[str, Any]:
        return {
            **super().state(),
            "gathered": [[draw.task.id, draw.epoch] for draw in self._deferred],
            "left": self._remaining,
        }

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._deferred = deque(TaskDraw(self.last_draw(id).task, epoch, again=True) for id, epoch in state["gathered"])
        self._remaining = state["left"]


def in_order(base: BaseSampler, rollout: RolloutConfig) -> TaskSampler:
    return base


def longest_first(base: BaseSampler, rollout: RolloutConfig) -> TaskSampler:
    return LongestFirst(base, rollout.lookahead)


def tail_batching(base: BaseSampler, rollout: RolloutConfig) -> TaskSampler:
    oversample, groups_per_step = rollout.oversample, rollout.groups_per_step
    if oversample * groups_per_step < 1 - 1e-9:
        raise UserError(
            "rollout.task_order is tail_batching, which needs surplus groups to cut, but rollout.oversample is "
            f"{oversample:g} of {groups_per_step} groups, less than one: write {max(0.25, 1 / groups_per_step):g} or more"
        )
    return TailBatching(base, groups_per_step, oversample)


TASK_SAMPLERS = Registry(
    "task sampler",
    "roll.task_samplers",
    {name: f"roll.scheduler.long_tail:{name}" for name in ("in_order", "longest_first", "tail_batching")},
)
"""By the names of `rollout.task_order`. ROLL's own are made with the sampler to wrap and the section `rollout`, others
with the sampler to wrap."""


def make_task_sampler(
    tasks: Sequence[Task],
    seed: int,
    rollout: RolloutConfig,
    *,
    sampler: Literal["epochs", "solve_rate"],
    weights: Mapping[str, float],
    root: str | os.PathLike[str] | None = None,
) -> TaskSampler:
    """Creates the task sampler that the config names."""
    policy = BatchPolicy(rollout.oversample, rollout.batch_selection)
    base: BaseSampler = EpochSampler(tasks, seed, weights, policy)
    if sampler == "solve_rate":
        base = SolveRateSampler(base, seed)
    found = TASK_SAMPLERS.find(rollout.task_order, "rollout.task_order", root)
    if rollout.task_order in TASK_SAMPLERS.own:
        made: TaskSampler = found(base, rollout)
        return made
    return _user_sampler(rollout.task_order, found, base)


_REQUIRED_METHODS = {
    "begin_step": "()",
    "next": "()",
    "requeue": "(task, epoch=None)",
    "requeue_unfinished": "(task, epoch=None)",
    "on_group_judged": "(task, rewards, tokens)",
    "state": "()",
    "restore": "(state)",
}


def _user_sampler(name: str, factory: Any, base: BaseSampler) -> TaskSampler:
    try:
        sampler: TaskSampler = factory(base)
    except Exception as error:
        raise UserError(
            f"rollout.task_order: {name!r}, called with the task sampler to wrap, failed: {type(error).__name__}: {error}"
        ) from error
    for method, signature in _REQUIRED_METHODS.items():
        if not _accepts(getattr(sampler, method, None), signature):
            raise UserError(
                f"rollout.task_order: the task sampler made by {name!r} has no method {method}{signature}: "
                "inherit from roll.scheduler.task_sampler.SamplerWrapper, which has all methods, and override what "
                "you change"
            )
    return sampler


def _accepts(method: Any, signature: str) -> bool:
    """Whether a method can be called with this signature, with and without the optional arguments."""
    if not callable(method):
        return False
    names = [part for part in signature.strip("()").split(", ") if part]
    needed = [part for part in names if "=" not in part]
    try:
        inspect.signature(method).bind(*needed)
        inspect.signature(method).bind(*names)
    except TypeError:
        return False
    return True
