"""What the pool and a grader process say to each other: pickled frames, each after its length.

The process first says `Ready` or `Refused`. Then the pool sends a job, a pickled `(task, response)`, and the process
answers `Scored` or `Failed`: one job at a time, so answers need no names. Answers hold only numbers and strings; no
type of the user's ever has to be read by the pool.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import BinaryIO, TypeAlias

from roll.child.frames import frame
from roll.reward.base import FailureKind, Verdict


@dataclass(frozen=True)
class Ready:
    """The reward function is loaded."""


@dataclass(frozen=True)
class Refused:
    """The reward function cannot be loaded."""

    reason: str
    users_fault: bool


@dataclass(frozen=True)
class Scored:
    """The function's verdict, and the seconds it took."""

    verdict: Verdict
    seconds: float


@dataclass(frozen=True)
class Failed:
    """The function gave no verdict."""

    kind: FailureKind
    reason: str
    detail: str = ""


Answer: TypeAlias = Ready | Refused | Scored | Failed


def write_answer(stream: BinaryIO, answer: Answer) -> None:
    """Send one answer at once."""
    stream.write(frame(pickle.dumps(answer)))
    stream.flush()
