"""What the pool and a grader process say to each other: pickled frames, each after its length.

The pool sends a `GraderSetUp`, and the process says `GraderReady` or `GraderRefused`. Then the pool sends a job, a
pickled `(task, response, said, votes)`, where `said` is what roles said of it and `votes` asks for its answer, and the
process answers `GraderScored` or `GraderFailed`, after an `GraderEntered` for each part of a composed reward: one job at
a time, so answers need no names. Answers hold only numbers and strings; no type of the user's ever has to be read by the
pool.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import BinaryIO, TypeAlias, get_args

from roll.process.framing import Reader, frame
from roll.reward.base import FailureKind, Verdict
from roll.reward.reward_spec import RewardSpec


@dataclass(frozen=True)
class GraderSetUp:
    """The reward, and the memory limit, 0 for none."""

    source: RewardSpec
    memory_mb: int


@dataclass(frozen=True)
class GraderReady:
    """The reward function is loaded."""


@dataclass(frozen=True)
class GraderRefused:
    """The reward function cannot be loaded."""

    reason: str
    users_fault: bool


@dataclass(frozen=True)
class GraderEntered:
    """A part of a composed reward is about to judge."""

    part: str


@dataclass(frozen=True)
class GraderScored:
    """The function's verdict, the seconds it and its parts took, and whether it would be the same another time."""

    verdict: Verdict
    seconds: float
    parts_s: dict[str, float] = field(default_factory=dict)
    deterministic: bool = False


@dataclass(frozen=True)
class GraderFailed:
    """The function gave no verdict."""

    kind: FailureKind
    reason: str
    detail: str = ""
    is_last: bool = False
    """Whether the process ends after this answer."""


Answer: TypeAlias = GraderReady | GraderRefused | GraderEntered | GraderScored | GraderFailed
ANSWERS = Reader((*get_args(Answer), Verdict))
"""Reads what a process answers."""
LIMIT_BYTES = 16 << 20
"""No answer of a process is larger: what claims to be is none."""


def write_answer(stream: BinaryIO, answer: Answer) -> None:
    """Send one answer at once."""
    stream.write(frame(pickle.dumps(answer)))
    stream.flush()
