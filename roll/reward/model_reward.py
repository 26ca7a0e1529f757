"""Rewards that a role's model gives: `reward_model`, and `judge` without a server.

A grader process knows no roles. So who has a job asks them first (`ask`), and what they said travels with the job; in the
grader the part reads it there (`PrecomputedScore`), and weights, gates and metrics are those of any part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias, TypeGuard

from roll.data.task import Message, Response, Task
from roll.reward.base import RewardFn
from roll.reward.extract import visible

Said: TypeAlias = Mapping[str, Mapping[str, float]]
"""What roles said of an attempt: the values of each part they were asked for, by its name; empty for a whole reward."""

said: ContextVar[Said] = ContextVar("said")
"""What roles said of the attempt that is being judged."""


@dataclass(frozen=True)
class JudgeSampling:
    """How a judge's replies are drawn: one for each seed."""

    seeds: tuple[int, ...]
    temperature: float
    max_tokens: int


class ScoreBackend(Protocol):
    """What the models of roles answer; `ScoreTimeout` if they do not in time, `ValueError` if they never can."""

    async def score(self, messages: Sequence[Message], timeout_s: float) -> float:
        """The reward model's score of a conversation."""
        ...

    async def replies(self, messages: Sequence[Message], drawing: JudgeSampling, timeout_s: float) -> list[str]:
        """The judge's next answers to a conversation."""
        ...


class ScoreTimeout(Exception):
    """A role gave no answer in time."""


class ModelBackedReward(Protocol):
    """A reward that is a role's to give. In a grader it is `PrecomputedScore`; called as it is, it has nobody to ask."""

    role: ClassVar[str]
    deterministic: ClassVar[bool]

    def __call__(self, task: Task, response: Response) -> Mapping[str, float]: ...

    async def ask(self, task: Task, response: Response, models: ScoreBackend) -> Mapping[str, float]:
        """The part's values; of them `reward` is its own."""
        ...


def asks_role(reward: object) -> TypeGuard[ModelBackedReward]:
    return hasattr(reward, "role") and hasattr(reward, "ask")


class PrecomputedScore:
    """A part that a role was asked for before."""

    quick = True

    def __init__(self, part: str, reward: ModelBackedReward) -> None:
        self._part = part
        self.__qualname__ = type(reward).__qualname__
        self.deterministic = reward.deterministic
        self._reward = reward

    def __call__(self, task: Task, response: Response) -> Mapping[str, float]:
        known = said.get({})
        return known[self._part] if self._part in known else self._reward(task, response)


def told(part: str, reward: RewardFn) -> RewardFn:
    """The reward as a grader calls it."""
    return PrecomputedScore(part, reward) if asks_role(reward) else reward


@dataclass(frozen=True)
class ModelScore:
    """The score of `roles.reward_model` for the conversation, as its own chat template shows it."""

    scale: float = 1.0
    """What the score is multiplied by."""
    shift: float = 0.0
    """What is added then."""
    sigmoid: bool = False
    """Whether the result is squeezed between 0 and 1."""
    timeout_s: float = 60.0
    """Seconds for one score."""

    role: ClassVar[str] = "reward_model"
    deterministic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and math.isfinite(self.shift)):
            raise ValueError(f"scale is {self.scale:g} and shift is {self.shift:g}, but both take finite numbers")
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s is {self.timeout_s:g}, but takes a number > 0")

    def __call__(self, task: Task, response: Response) -> Mapping[str, float]:
        raise LookupError("the role reward_model was not asked: this reward is given where a run has that role")

    async def ask(self, task: Task, response: Response, models: ScoreBackend) -> Mapping[str, float]:
        answer = Message(role="assistant", content=visible(response.text) or "")
        score = await models.score([*task.messages, answer], self.timeout_s)
        value = self.scale * score + self.shift
        return {"reward": _sigmoid(value) if self.sigmoid else value, "score": score}


def _sigmoid(value: float) -> float:
    return (1 + math.tanh(value / 2)) / 2
