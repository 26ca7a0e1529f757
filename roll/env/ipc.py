"""IPC between the pool and an environment process: length-prefixed, pickled frames.

The pool sends `(number, request)` and gets one `(number, result, seconds)` for each, in any order, besides notifications.
The pool never has two in-flight requests for one environment, which `handle` identifies. Results contain only numbers and
strings: the pool never unpickles a user's type, and the process unpickles those of a request only when the environment
handles it.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TypeAlias, get_args

from roll.env.base import FailureKind, ResetResult, Step
from roll.process import framing

LIMIT_BYTES = 64 << 20
"""Maximum size of a frame from a process; anything larger is invalid."""


@dataclass(frozen=True)
class EnvSetUp:
    """The first request: the folder that names are resolved from, and the memory limit, 0 for none."""

    root: str
    memory_mb: int


@dataclass(frozen=True)
class EnvPing:
    """Answered at once by a live process, after everything that it sent before."""


@dataclass(frozen=True)
class EnvLoad:
    """Import an environment's code, by its name or from `code`."""

    name: str
    code: str | bytes


@dataclass(frozen=True)
class EnvReset:
    """Create an environment and begin its episode. `options` is a pickled dict."""

    handle: int
    name: str
    seed: int
    options: bytes


@dataclass(frozen=True)
class EnvAct:
    handle: int
    action: str


@dataclass(frozen=True)
class EnvClose:
    handle: int


@dataclass(frozen=True)
class EnvReady:
    """Done, without a result."""


@dataclass(frozen=True)
class EnvFailed:
    """The call failed."""

    kind: FailureKind
    reason: str
    detail: str = ""


@dataclass(frozen=True)
class EnvSettled:
    """Notification: an environment has a thread of its own. Sent with the number `NO_REQUEST`."""

    handle: int
    thread: int


@dataclass(frozen=True)
class EnvEnding:
    """Notification: an environment is about to end the process."""

    handle: int
    how: str


NO_REQUEST = -1
"""The number of messages that answer no request."""

EnvCall: TypeAlias = EnvReset | EnvAct | EnvClose
"""A request for one environment."""
Request: TypeAlias = EnvSetUp | EnvPing | EnvLoad | EnvCall
Result: TypeAlias = EnvReady | ResetResult | Step | EnvFailed
Notice: TypeAlias = EnvSettled | EnvEnding
RESULTS = framing.Reader(get_args(Result | Notice))
"""Decodes the messages of a process."""


def frame(message: tuple[int, Request] | tuple[int, Result | Notice, float]) -> bytes:
    """An encoded message, ready to be sent."""
    return framing.frame(pickle.dumps(message))
