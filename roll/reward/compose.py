"""Composed rewards: a weighted sum of named parts, with gates.

With parts `right` (weight 1) and `form` (weight 0.2, a gate), an attempt that is right and in form is worth 1.2; one that
is right but not in form is worth `gate_value`, whatever the sum is. The value of every part is returned with the reward,
whether gates are open or closed; further values of a part are returned as `part/name`.

Invariants: the reward does not depend on the order of the parts, and a part that fails is named.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roll.data.task import Response, Task
from roll.reward.base import (
    PartFailure,
    Result,
    RewardFn,
    answer_of,
    check_answer,
    is_deterministic,
    is_quick,
    normalise,
    on_part_start,
    reads_answers,
)
from roll.reward.builtin import ROLE_REWARDS
from roll.reward.factory import check_built_in, make
from roll.reward.model_reward import ModelBackedReward, asks_role, for_grader

if TYPE_CHECKING:
    from roll.config.reward import RewardRule


@dataclass(frozen=True)
class WeightedPart:
    """One part of a rule, as `roll.config.reward.RewardPart` describes it."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    gate: bool = False
    gate_at: float | None = None
    gate_value: float = 0.0

    def closes(self, value: float) -> bool:
        """Whether the part is a gate and closed at this value."""
        return self.gate and (value <= 0 if self.gate_at is None else value < self.gate_at)


@dataclass(frozen=True)
class ComposedRule:
    """A reward in plain types: grader processes read it without importing the configuration's library."""

    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, WeightedPart] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """The names of its rewards."""
        return {part.name for part in self.parts.values()} or {self.name}

    @classmethod
    def of(cls, config: RewardRule) -> ComposedRule:
        """The rule of a configuration."""
        return cls(
            config.name, config.options, {name: WeightedPart(**part.model_dump()) for name, part in config.parts.items()}
        )


def compose(
    config: RewardRule | ComposedRule, *, root: str | os.PathLike[str] | None = None, where: str = "reward"
) -> RewardFn:
    """The reward that a configuration or a rule describes. A `UserError` names the wrong setting, prefixed by `where`."""
    rule = config if isinstance(config, ComposedRule) else ComposedRule.of(config)
    if not rule.parts:
        return for_grader("", make(rule.name, rule.options, root=root, where=where))
    parts = {
        name: for_grader(name, make(part.name, part.options, root=root, where=f"{where}.parts.{name}"))
        for name, part in rule.parts.items()
    }
    return Composed(rule.parts, parts)


def model_backed_rewards(rule: ComposedRule) -> dict[str, ModelBackedReward]:
    """The rewards of a rule that model roles give, by the part's name; "" for a whole reward."""
    named = {name: (part.name, part.options) for name, part in rule.parts.items()} or {"": (rule.name, rule.options)}
    made = {part: make(name, options) for part, (name, options) in named.items() if name in ROLE_REWARDS}
    return {part: reward for part, reward in made.items() if asks_role(reward)}


def check_rule(rule: ComposedRule, where: str = "reward") -> None:
    """Raises `UserError` if an option has the wrong type or names a missing token."""
    if not rule.parts:
        check_built_in(rule.name, rule.options, where)
    for name, part in rule.parts.items():
        check_built_in(part.name, part.options, f"{where}.parts.{name}")


def warm_up(reward: RewardFn) -> None:
    """Does a reward's one-time setup before its first job, so that no verdict's deadline pays for it."""
    prepare = getattr(reward, "warm_up", None)
    if callable(prepare):
        prepare()


class Composed:
    """A weighted sum of rewards with gates."""

    def __init__(self, parts: Mapping[str, WeightedPart], rewards: Mapping[str, RewardFn]) -> None:
        self._parts = parts
        self._rewards = rewards
        self.__qualname__ = " + ".join(parts)  # for messages

    def __call__(self, task: Task, response: Response) -> Result:
        values: dict[str, float] = {}
        seconds: dict[str, float] = {}
        terms: list[float] = []
        closed: list[float] = []
        watcher = on_part_start.get(None)
        for name, part in self._parts.items():
            if watcher is not None:
                watcher(name)
            started = time.perf_counter()
            try:
                returned = self._rewards[name](task, response)
            except BaseException as error:
                raise PartFailure(name, "raised") from error
            seconds[name] = time.perf_counter() - started
            try:
                verdict = normalise(returned)
            except Exception as error:
                raise PartFailure(name, "invalid") from error
            values[name] = verdict.reward
            values |= {f"{name}/{inner}": value for inner, value in verdict.parts.items()}
            terms.append(part.weight * verdict.reward)
            if part.closes(verdict.reward):
                closed.append(part.gate_value)
        reward = min(closed) if closed else math.fsum(terms)
        return Result({"reward": reward, **values}, seconds)

    def deterministic(self, task: Task) -> bool:
        """Whether all parts are deterministic."""
        return all(is_deterministic(reward, task) for reward in self._rewards.values())

    def check_answer(self, task: Task) -> bool:
        """Whether all parts accept the task's answer."""
        accepted = [check_answer(reward, task) for reward in self._rewards.values()]
        return all(accepted)

    @property
    def answer_of(self) -> Callable[[Task, Response], str | None] | None:
        """The `answer_of` of the only part that extracts answers; None if there is none, or more than one."""
        extracting = [reward for reward in self._rewards.values() if reads_answers(reward)]
        return functools.partial(answer_of, extracting[0]) if len(extracting) == 1 else None

    @property
    def quick(self) -> bool:
        return all(is_quick(reward) for reward in self._rewards.values())

    def warm_up(self) -> None:
        """Warms up all parts."""
        for reward in self._rewards.values():
            warm_up(reward)
