"""What the pool and an environment process say to each other: pickled frames, each after its length.

The pool sends `(number, request)` and gets one `(number, result, seconds)` for each, in any order, and news besides.
Of one environment, called by its `place`, the pool never has two requests under way. Results hold only numbers and
strings; no type of the user's ever has to be read by the pool, and none that a request brings is read before the
environment's own turn.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TypeAlias, get_args

from roll.env.base import FailureKind, ResetResult, Step
from roll.process import framing

LIMIT_BYTES = 64 << 20
"""No frame of a process is larger: what claims to be is none."""


@dataclass(frozen=True)
class EnvSetUp:
    """The first request: where names are looked up from, and the memory limit, 0 for none."""

    root: str
    memory_mb: int


@dataclass(frozen=True)
class EnvPing:
    """Answered at once by a process that lives, after all it had said before."""


@dataclass(frozen=True)
class EnvLoad:
    """Import an environment's code, by its name or from the place that is given."""

    name: str
    code: str | bytes


@dataclass(frozen=True)
class EnvReset:
    """Make an environment and begin its episode. `options` is a pickled dict."""

    place: int
    name: str
    seed: int
    options: bytes


@dataclass(frozen=True)
class EnvAct:
    place: int
    action: str


@dataclass(frozen=True)
class EnvClose:
    place: int


@dataclass(frozen=True)
class EnvReady:
    """Done, nothing to tell."""


@dataclass(frozen=True)
class EnvFailed:
    """The environment gave no answer."""

    kind: FailureKind
    reason: str
    detail: str = ""


@dataclass(frozen=True)
class EnvSettled:
    """An environment has a thread of its own. Sent by itself, with the number `BY_ITSELF`."""

    place: int
    thread: int


@dataclass(frozen=True)
class EnvEnding:
    """An environment is about to end the process. Sent by itself too."""

    place: int
    how: str


BY_ITSELF = -1
"""The number of what answers no request."""

Visit: TypeAlias = EnvReset | EnvAct | EnvClose
"""A request for one environment."""
Request: TypeAlias = EnvSetUp | EnvPing | EnvLoad | Visit
Result: TypeAlias = EnvReady | ResetResult | Step | EnvFailed
News: TypeAlias = EnvSettled | EnvEnding
RESULTS = framing.Reader(get_args(Result | News))
"""Reads what a process says."""


def frame(message: tuple[int, Request] | tuple[int, Result | News, float]) -> bytes:
    """A message, ready to be written."""
    return framing.frame(pickle.dumps(message))
