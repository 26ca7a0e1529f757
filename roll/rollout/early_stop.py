"""Early stopping: predicates on a running response. If one returns a reason, the response ends with the tokens so far.

Predicates run whenever an engine reports progress, so the exact token at which a response ends depends on timing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from roll.config.errors import RunError, UserError
from roll.config.user_code import load_user_code
from roll.data.task import Task
from roll.data.tokenlog import IntArray


@dataclass(frozen=True)
class RunningResponse:
    """A response so far."""

    task: Task
    ids: IntArray
    """Its tokens, without the prompt."""
    text: Callable[[], str]
    """Decodes its text."""
    finished_siblings: Sequence[int] = ()
    """Response tokens of each finished sample of its group."""


EarlyStop = Callable[[RunningResponse], str | None]


@dataclass(frozen=True)
class RepetitionStop:
    """Ends a response that repeats itself: its last tokens are one span of at most `max_span` tokens, repeated at least
    `times` times in a row and at least `min_tokens` tokens in total. By default a span of 1 token must repeat 64 times
    and a span of 16 or more tokens 4 times, so four newlines or a row of zeros do not end a response."""

    max_span: int = 64
    times: int = 4
    min_tokens: int = 64

    def __call__(self, running: RunningResponse) -> str | None:
        ids = running.ids
        if len(ids) < max(self.min_tokens, self.times):
            return None
        recent = ids[-1 - self.max_span : -1][::-1]  # a span of n repeats only if token -1 is also token -1 - n
        for span in (np.flatnonzero(recent == ids[-1]) + 1).tolist():
            times = max(self.times, math.ceil(self.min_tokens / span))
            tail = ids[-span * times :]
            if len(tail) == span * times and np.array_equal(tail[span:], tail[:-span]):
                return f"repetition: {span} tokens {times} times in a row"
        return None


@dataclass(frozen=True)
class LengthBudget:
    """Ends a response longer than `factor` times the mean of its finished siblings, if there are two or more."""

    factor: float = 4.0
    min_tokens: int = 64

    def __call__(self, running: RunningResponse) -> str | None:
        siblings = running.finished_siblings
        if len(siblings) < 2 or len(running.ids) < self.min_tokens:
            return None
        budget = self.factor * sum(siblings) / len(siblings)
        if len(running.ids) <= budget:
            return None
        return f"length budget: {len(running.ids)} tokens, {len(siblings)} siblings allow {budget:.0f}"


@dataclass(frozen=True)
class AnyOf:
    """Ends a response for the reason of the first predicate that returns one."""

    predicates: tuple[EarlyStop, ...]

    def __call__(self, running: RunningResponse) -> str | None:
        return next((reason for predicate in self.predicates if (reason := predicate(running)) is not None), None)


@dataclass(frozen=True)
class UserStop:
    """A user's function of a running response: a reason or True ends the response, None or False continues it."""

    name: str
    function: Callable[[RunningResponse], Any]

    def __call__(self, running: RunningResponse) -> str | None:
        try:
            verdict = self.function(running)
        except Exception as error:
            raise RunError(
                f"the early stop {self.name!r} failed on a response to task {running.task.id!r}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if verdict is None or verdict is False:
            return None
        if verdict is True:
            return f"ended early: by {self.name}"
        if isinstance(verdict, str) and verdict:
            return verdict
        raise RunError(
            f"the early stop {self.name!r} returned {verdict!r}: return the reason to end a response or None to "
            "continue it, or True to end it and False to continue it"
        )


def make_early_stop(names: Sequence[str], root: str | os.PathLike[str] | None = None) -> EarlyStop | None:
    """One predicate that combines all named ones; None without names. Names are `repetition`, `repetition=6` (times),
    `length_budget`, `length_budget=2.5` (factor), or a user's function."""
    predicates = tuple(_make(name, root) for name in names)
    return AnyOf(predicates) if len(predicates) > 1 else next(iter(predicates), None)


def _make(name: str, root: str | os.PathLike[str] | None) -> EarlyStop:
    kind, equals, value = name.partition("=")
    if kind == "repetition":
        return RepetitionStop(times=int(_number(name, value, 2, whole=True))) if equals else RepetitionStop()
    if kind == "length_budget":
        return LengthBudget(_number(name, value, 1)) if equals else LengthBudget()
    known = ["repetition", "length_budget"]
    return UserStop(name, load_user_code(name, what="rollout.early_stop", known=known, root=root))


def _number(name: str, value: str, minimum: float, whole: bool = False) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not minimum <= number < math.inf or (whole and number != int(number)):
        example = name.partition("=")[0] + "=4"
        kind = "a whole number" if whole else "a number"
        raise UserError(f"rollout.early_stop: {name!r} needs {kind} of at least {minimum:g}: write {example!r}")
    return number
