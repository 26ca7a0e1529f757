"""Messages between the controller and the rollout workers. Their size does not depend on the length of responses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from roll.data.task import Task


@dataclass(frozen=True)
class Lease:
    """Samples of one task that a rollout worker runs until they are judged, starting on one engine."""

    key: str
    engine: int
    task: Task
    group: int
    temperature: float
    samples: tuple[str, ...]
    version: int = 0
    """Version of the weights when the lease was created."""
    tries: int = 1
    greedy: str | None = None
    """Id of the sample that is generated at temperature 0, if any."""
    votes: bool = False
    """Whether the graders also return the extracted answer of each sample, for majority voting."""
    records: bool = True
    """Whether the engines record expert routes of the samples' tokens (router replay)."""


@dataclass(frozen=True)
class EngineAssignment:
    """Assigns an engine to a sample that waits in `queued`, because its engine died or the sample was requeued."""

    sample: str
    engine: int
    version: int = 0


@dataclass(frozen=True)
class SampleCommand:
    """A command for one sample: `end` its response early with the tokens so far; `requeue` it, which aborts it on its
    engine and resumes it from its prefix when it is assigned to an engine again; or `drop` it in any state."""

    sample: str
    action: Literal["end", "requeue", "drop"]
    reason: str


WorkerCommand: TypeAlias = EngineAssignment | SampleCommand


@dataclass(slots=True)  # not frozen, which would triple the time to make one
class SampleResult:
    """The result of a sample, without its tokens. It is never modified."""

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


@dataclass(frozen=True)
class BufferedGroup:
    """A finished group in a checkpoint, which has at least its `scored` samples."""

    lease: str
    group: int
    task: Task
    scored: tuple[str, ...]


@dataclass(frozen=True)
class FinalState:
    """The controller's final state of a sample, which the rollout worker writes with the sample's tokens."""

    sample: str
    state: str
    reason: str
