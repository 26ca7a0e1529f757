"""The rule for numbers from rewards and environments.

A reward is from -1e6 to 1e6. Trainers compute in fp32, whose spacing at 1e6 is 0.06: rewards of 1,000,000 and 1,000,001
still differ there, while those of 10,000,000 and 10,000,001 give wrong advantages (docs/guides/rewards.md has the table).
Their squares, summed over the tokens of a step, stay far below the fp32 maximum. Larger rewards are not clipped but
refused: their scale is probably a mistake.

Any other number (a metric, the info of a step) is from -1e30 to 1e30: each is finite in the fp32 in which trackers store
metrics, and so are sums of their squares in fp64.

Every process that judges or acts imports this module, so it imports little but the standard library.
"""

from __future__ import annotations

import math
from types import CoroutineType
from typing import Any

from roll.config.secrets import KNOWN

LARGEST_REWARD = 1e6
LARGEST_METRIC = 1e30


def reward_of(value: Any, what: str, if_async: str = "was an `await` forgotten?") -> float:
    """A value as a reward; raises a `ValueError` that says, after `what`, why it is none."""
    return check_reward(finite(value, what, if_async), what)


def check_reward(number: float, what: str) -> float:
    """The number, if it is small enough for a reward."""
    if not abs(number) <= LARGEST_REWARD:
        raise ValueError(
            f"{what} {number:g}, but a reward is from -{LARGEST_REWARD:g} to {LARGEST_REWARD:g}: divide it by its scale"
        )
    return number


def metric_of(value: Any, what: str, if_async: str = "was an `await` forgotten?") -> float:
    """A value as a metric; raises a `ValueError` that says, after `what`, why it is none."""
    number = finite(value, what, if_async)
    if not abs(number) <= LARGEST_METRIC:
        raise ValueError(
            f"{what} {number:g}, but a number beside a reward is from -{LARGEST_METRIC:g} to {LARGEST_METRIC:g}"
        )
    return number


def finite(value: Any, what: str, if_async: str) -> float:
    """A value as a finite number; raises a `ValueError` that says, after `what`, why it is none."""
    if not hasattr(value, "__float__"):
        raise ValueError(f"{what} {describe(value)}, not a number{hint(value, if_async)}")
    try:
        number = float(value)
    except Exception as error:
        raise ValueError(f"{what} {short_repr(value)}, which is not one number: {error}") from error
    if not math.isfinite(number):
        raise ValueError(f"{what} {number}, not a finite number")
    return number


def hint(value: object, if_async: str = "was an `await` forgotten?") -> str:
    """The probable mistake behind such a return value."""
    if isinstance(value, CoroutineType):
        value.close()
        return f": {if_async}"
    return ": is a `return` missing?" if value is None else ""


def describe(value: object) -> str:
    """A value and its type, for a message."""
    kind = type(value).__name__
    if value is None:
        return "None"
    return f"a {kind}" if isinstance(value, CoroutineType) else f"{short_repr(value)} ({kind})"


def short_repr(value: object, limit: int = 80) -> str:
    """The beginning of a value's repr. A number of thousands of digits has none, and a user's repr may raise anything."""
    try:
        text = KNOWN.without(repr(value))  # before it is cut: a part of a secret would not be recognised
    except Exception as error:
        return f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"
    return text if len(text) <= limit else f"{text[:limit]}…"
