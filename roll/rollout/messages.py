"""What the controller and the rollout workers tell each other. Nothing here grows with the length of a response."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from roll.data.task import Task
from roll.ledger.log import Transition


@dataclass(frozen=True)
class Lease:
    """Samples of one task, given to a rollout worker to carry to their verdicts, on one engine to begin with."""

    key: str
    engine: int
    task: Task
    group: int
    temperature: float
    samples: tuple[str, ...]
    version: int = 0
    """Of the weights, when the lease was given."""
    tries: int = 1
    greedy: str | None = None
    """The one of its samples that is drawn at temperature 0."""
    votes: bool = False
    """Whether the answers of its samples are asked for."""
    records: bool = True
    """Whether engines record which experts their tokens were sent to."""


@dataclass(frozen=True)
class EngineAssignment:
    """An engine for a sample that lost its own, or was taken off it, and waits in `queued`."""

    sample: str
    engine: int
    version: int = 0


@dataclass(frozen=True)
class SampleCommand:
    """Interferes with a sample: `end` its response with what it has, take it off its engine (`requeue`: it goes on from
    its prefix when it has a seat again), or `drop` it, whatever it is at."""

    sample: str
    how: Literal["end", "requeue", "drop"]
    reason: str


WorkerCommand: TypeAlias = Lease | EngineAssignment | SampleCommand


@dataclass(frozen=True)
class SampleResult:
    """What became of a sample, without its tokens."""

    sample: str
    reward: float
    parts: dict[str, float]
    tokens: int
    response_tokens: int
    finish: str | None
    oldest: int | None = None
    newest: int | None = None
    turns: int = 0
    tries: int = 1
    kills: float = 0.0
    turn_rewards: list[float] = field(default_factory=list)
    turn_states: list[int] = field(default_factory=list)
    answer: str | None = None


@dataclass
class Report:
    """What happened at a rollout worker since its last report: moves in order, outcomes, and leases that are done."""

    moves: list[Transition] = field(default_factory=list)
    outcomes: list[SampleResult] = field(default_factory=list)
    done: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class BufferedGroup:
    """A finished group whose samples are in a checkpoint, those that are `scored` at least."""

    lease: str
    group: int
    task: Task
    scored: tuple[str, ...]


@dataclass(frozen=True)
class FinalState:
    """How a sample ended on the controller's books, for the record of its tokens."""

    sample: str
    state: str
    reason: str
