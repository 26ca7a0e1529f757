"""What the controller and the rollout workers tell each other. Nothing here grows with the length of a response."""

from __future__ import annotations

from dataclasses import dataclass, field

from roll.data.task import Task
from roll.run.ledger import Transition


@dataclass(frozen=True)
class Lease:
    """Samples of one task, given to a rollout worker to carry to their verdicts on one engine."""

    key: str
    engine: int
    task: Task
    group: int
    temperature: float
    samples: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What became of a sample, without its tokens."""

    sample: str
    reward: float
    parts: dict[str, float]
    tokens: int
    response_tokens: int
    finish: str | None


@dataclass
class Report:
    """What happened at a rollout worker since its last report: moves in order, outcomes, and leases that are done."""

    moves: list[Transition] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    done: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Fate:
    """How a sample ended on the controller's books, for the record of its tokens."""

    sample: str
    state: str
    reason: str
