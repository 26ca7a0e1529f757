"""IPC between the pool and a grader process: length-prefixed, pickled frames.

The pool sends a `GraderSetUp`, and the process answers `GraderReady` or `GraderRefused`. Then the pool sends a job, a
pickled `(task, response, role_scores, votes)`, where `role_scores` has the scores of model roles and `votes` requests the
extracted answer. The process answers `GraderScored` or `GraderFailed`, after a `GraderEntered` for each part of a
composed reward. There is one job at a time, so answers need no number. Answers contain only numbers and strings: the pool
never unpickles a user's type.
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
    """The verdict, the seconds that the function and its parts took, and whether the reward is deterministic."""

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
"""Decodes the answers of a process."""
LIMIT_BYTES = 16 << 20
"""Maximum size of an answer from a process; anything larger is invalid."""


def write_answer(stream: BinaryIO, answer: Answer) -> None:
    """Sends one answer at once."""
    stream.write(frame(pickle.dumps(answer)))
    stream.flush()
