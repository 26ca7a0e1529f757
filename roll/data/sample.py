"""A sample: one attempt at a task, and its group: the attempts compared with each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from roll.data.task import Response, Task
from roll.data.tokenlog import TokenLog


@dataclass
class Sample:
    """One attempt. Its id names it for ever: the noise that draws its tokens depends on nothing else but the seed."""

    id: str
    task: Task
    group: int
    temperature: float
    log: TokenLog = field(default_factory=TokenLog)
    """Empty on the controller: a sample's tokens are with the rollout worker that ran it."""
    state: str = "new"
    reason: str = ""
    response: Response | None = None
    """As its grader sees it; None on the controller, like its tokens."""
    tokens: int = 0
    response_tokens: int = 0
    finish: str | None = None
    reward: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """Spent in each state."""
    entered_s: float = 0.0
    """When it came into its state, on the monotonic clock."""


@dataclass
class Group:
    """The samples of one task that are scored against each other, issued together under one index."""

    index: int
    task: Task
    samples: list[Sample]

    @property
    def scored(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.state == "scored"]
