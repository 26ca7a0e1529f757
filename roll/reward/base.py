"""The reward interface: what a reward may return, and how judging fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, SupportsFloat, TypeAlias, cast

from roll.config.secrets import KNOWN
from roll.data.finite import LARGEST_REWARD, check_reward, metric_of, reward_of, short_repr
from roll.data.task import Response, Task

RewardFn: TypeAlias = Callable[[Task, Response], SupportsFloat | Mapping[str, SupportsFloat]]

FailureKind: TypeAlias = Literal["raised", "deadline", "crashed", "invalid", "unanswered"]
"""`raised`: the function raised an exception. `deadline`: it took too long. `crashed`: its process died. `invalid`: its
result is not a reward. `unanswered`: a model role did not answer in time."""


@dataclass(frozen=True)
class Verdict:
    """A finite reward, and the named parts that the reward function returned with it (metrics)."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    answer: str | None = None
    """The answer extracted from the response, for a vote; None if there is none, or none was requested."""


class ScoreFailure(Exception):
    """An attempt could not be judged. `reason` is one line; `detail` is the function's traceback, if it raised."""

    def __init__(self, kind: FailureKind, reason: str, detail: str = "") -> None:
        super().__init__(kind, reason, detail)
        self.kind: FailureKind = kind
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"


class Result(dict[str, float]):
    """Named values, including `reward`, and the seconds that each part took."""

    def __init__(self, values: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        super().__init__(values)
        self.seconds = dict(seconds)


class PartFailure(Exception):
    """A part of a composed reward raised, or its result is not a reward; the error is the cause."""

    def __init__(self, part: str, kind: FailureKind) -> None:
        super().__init__(part, kind)
        self.part = part
        self.kind: FailureKind = kind


on_part_start: ContextVar[Callable[[str], None] | None] = ContextVar("on_part_start")
"""Called by a composed reward with the part that is about to judge, so that a part that hangs or crashes can be named."""


def is_deterministic(reward: RewardFn, task: Task) -> bool:
    """Whether a reward declares that it always judges the same response to this task the same.

    It declares so by an attribute or a method `deterministic`; without one, it may be random or call other services.
    """
    declared = getattr(reward, "deterministic", False)
    return bool(declared(task) if callable(declared) else declared)


def check_answer(reward: RewardFn, task: Task) -> bool:
    """Whether the task's answer is known to be valid.

    A reward declares so by a method `check_answer(task)`: True for a valid answer, False if only judging can tell, and
    `ValueError` for an answer that no response satisfies, with what is wrong and what to write instead. Without such a
    method every answer is valid.
    """
    check = getattr(reward, "check_answer", None)
    return bool(check(task)) if callable(check) else True


def is_quick(reward: RewardFn) -> bool:
    """Whether a reward declares, by an attribute `quick`, that it judges any short text at once, so that it needs no
    process."""
    return bool(getattr(reward, "quick", False))


def reads_answers(reward: RewardFn) -> bool:
    """Whether a reward can extract the answer of a response, by a method `answer_of(task, response)`."""
    return callable(getattr(reward, "answer_of", None))


def answer_of(reward: RewardFn, task: Task, response: Response) -> str | None:
    """The answer that a reward extracts from a response, normalised so that equal answers are equal strings."""
    answer = cast(Any, reward).answer_of(task, response)
    if answer is not None and not isinstance(answer, str):
        raise ValueError(f"answer_of returned {short_repr(answer)} ({type(answer).__name__}), not a string or None")
    return answer


def normalise(result: object, who: Callable[[], str] = lambda: "the reward function") -> Verdict:
    """The verdict of a reward function's result; `ValueError` says what is wrong, and that `who()` returned it.

    A number is the reward. In a mapping, the value under `reward` is the reward and the others are its parts; without
    that key the sum of the parts is the reward: `{"right": 1, "format": 0.2}` is worth 1.2.
    """
    if type(result) is float and abs(result) <= LARGEST_REWARD:
        return Verdict(result)
    returned = f"{who()} returned"
    if not isinstance(result, Mapping):
        return Verdict(reward_of(result, returned, _IF_ASYNC))
    if not result:
        raise ValueError(f"{returned} an empty mapping, not a number or named parts")
    for name in result:
        if not isinstance(name, str):
            raise ValueError(f"{returned} a part named {short_repr(name)}: names are strings")
    parts = {
        KNOWN.without(name): metric_of(value, f"{returned}, as {name!r},", _IF_ASYNC) for name, value in result.items()
    }
    if "reward" in parts:
        return Verdict(check_reward(parts.pop("reward"), f"{returned}, as 'reward',"), parts)
    return Verdict(check_reward(sum(parts.values()), f"the parts that {returned} sum to"), parts)


def name_of(reward: RewardFn) -> str:
    """The name of a reward in messages: that of the function or of its class."""
    return str(getattr(reward, "__qualname__", None) or type(reward).__qualname__)


_IF_ASYNC = "write `def`, not `async def`"
