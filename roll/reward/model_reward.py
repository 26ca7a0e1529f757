"""Rewards that a role's model computes: `reward_model`, and `judge` without a server.

A grader process has no access to roles. So the reward worker queries them first (`ask`), and sends their scores with the
job; in the grader the part reads them (`PrecomputedScore`), and has weight, gate and metrics like any other part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias, TypeGuard

from roll.data.task import Message, Response, Task
from roll.reward.base import RewardFn
from roll.reward.extract import strip_thinking

RoleScores: TypeAlias = Mapping[str, Mapping[str, float]]
"""The scores that roles gave an attempt: the values of each part, by the part's name ("" for a whole reward)."""

role_scores: ContextVar[RoleScores] = ContextVar("role_scores")
"""The roles' scores of the attempt that the grader is judging."""


@dataclass(frozen=True)
class JudgeSampling:
    """Sampling parameters of a judge's replies: one reply per seed."""

    seeds: tuple[int, ...]
    temperature: float
    max_tokens: int


class ScoreBackend(Protocol):
    """Access to the models of roles. Raises `ScoreTimeout` if they do not answer in time, `ValueError` if they never
    can."""

    async def score(self, messages: Sequence[Message], timeout_s: float) -> float:
        """The reward model's score of a conversation."""
        ...

    async def replies(self, messages: Sequence[Message], sampling: JudgeSampling, timeout_s: float) -> list[str]:
        """The judge's replies to a conversation."""
        ...


class ScoreTimeout(Exception):
    """A role did not answer in time."""


class ModelBackedReward(Protocol):
    """A reward that a role gives. In a grader `PrecomputedScore` replaces it; called directly, it raises."""

    role: ClassVar[str]
    deterministic: ClassVar[bool]

    def __call__(self, task: Task, response: Response) -> Mapping[str, float]: ...

    async def ask(self, task: Task, response: Response, models: ScoreBackend) -> Mapping[str, float]:
        """The part's values; `reward` is its own value."""
        ...


def asks_role(reward: object) -> TypeGuard[ModelBackedReward]:
    return hasattr(reward, "role") and hasattr(reward, "ask")


class PrecomputedScore:
    """A part that a role has already scored."""

    quick = True

    def __init__(self, part: str, reward: ModelBackedReward) -> None:
        self._part = part
        self.__qualname__ = type(reward).__qualname__
        self.deterministic = reward.deterministic
        self._reward = reward

    def __call__(self, task: Task, response: Response) -> Mapping[str, float]:
        scores = role_scores.get({})
        return scores[self._part] if self._part in scores else self._reward(task, response)


def for_grader(part: str, reward: RewardFn) -> RewardFn:
    """The reward in the form that a grader calls."""
    return PrecomputedScore(part, reward) if asks_role(reward) else reward


@dataclass(frozen=True)
class ModelScore:
    """The score of `roles.reward_model` for the conversation, rendered with that model's own chat template."""

    scale: float = 1.0
    """Factor of the score."""
    shift: float = 0.0
    """Added after scaling."""
    sigmoid: bool = False
    """Whether the result is passed through a sigmoid, to lie between 0 and 1."""
    timeout_s: float = 60.0
    """Timeout in seconds for one score."""

    role: ClassVar[str] = "reward_model"
    deterministic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and math.isfinite(self.shift)):
            raise ValueError(f"scale is {self.scale:g} and shift is {self.shift:g}, but both take finite numbers")
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s is {self.timeout_s:g}, but takes a number > 0")

    def __call__(self, task: Task, response: Response) -> Mapping[str, float]:
        raise LookupError(
            "the role reward_model gave no score for this attempt: this reward works only in a run that has that role"
        )

    async def ask(self, task: Task, response: Response, models: ScoreBackend) -> Mapping[str, float]:
        answer = Message(role="assistant", content=strip_thinking(response.text) or "")
        score = await models.score([*task.messages, answer], self.timeout_s)
        value = self.scale * score + self.shift
        return {"reward": _sigmoid(value) if self.sigmoid else value, "score": score}


def _sigmoid(value: float) -> float:
    return (1 + math.tanh(value / 2)) / 2
