"""A sample: one attempt at a task; and its group: the attempts that are compared with each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from roll.data.task import Response, Task
from roll.data.tokenlog import TokenLog


@dataclass(slots=True)
class Sample:
    """One attempt. Its id never changes: the randomness of its tokens depends only on the id and the seed."""

    id: str
    task: Task
    group: int
    temperature: float
    log: TokenLog = field(default_factory=TokenLog)
    """Empty on the controller: the rollout worker that ran the sample has its tokens."""
    state: str = "new"
    reason: str = ""
    priority: int = 0
    """Samples with a higher priority go first."""
    greedy: bool = False
    """Sampled at temperature 0: its reward is the baseline of its siblings, and it is not trained on."""
    records: bool = True
    """Whether engines record which experts its tokens were routed to, so that the trainer can replay them."""
    tries: int = 1
    """Attempts so far: above 1 if a worker died or hung while it ran."""
    kills: float = 0.0
    """Graders and environment processes that it crashed or hung; a fraction if several samples may have caused a
    crash."""
    ended: str = ""
    """Why its response was stopped early."""
    turns: int = 0
    """Responses so far."""
    oldest: int | None = None
    """Version of the weights that sampled, or may have sampled, its first token; None before it has an engine."""
    newest: int | None = None
    """Version that sampled its last token."""
    response: Response | None = None
    """As its grader sees it; None on the controller, like its tokens."""
    tokens: int = 0
    response_tokens: int = 0
    finish: str | None = None
    reward: float = 0.0
    turn_rewards: list[float] = field(default_factory=list)
    """Reward per turn in its environment; empty without one."""
    turn_states: list[int] = field(default_factory=list)
    """State key of the environment before each turn: equal numbers are equal states."""
    parts: dict[str, float] = field(default_factory=dict)
    votes: bool = False
    """Whether its answer is extracted, to be counted with those of other attempts at its task."""
    answer: str | None = None
    """The answer that its grader extracted from its response, if requested."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds spent in each state."""
    entered_s: float = 0.0
    """When it entered its state, in seconds since the epoch."""


@dataclass(slots=True)
class Group:
    """The samples of one task that are compared with each other, issued together under one index."""

    index: int
    task: Task
    samples: list[Sample]
    epoch: int = 0
    priority: int = 0
    version: int = 0
    """Version of the weights when it was issued."""

    @property
    def oldest(self) -> int | None:
        """Version of the oldest token to train on; None while none can have been sampled."""
        return min((s.oldest for s in self.samples if s.oldest is not None and not s.greedy), default=None)

    @property
    def scored(self) -> list[Sample]:
        """The samples to train on."""
        return [sample for sample in self.samples if sample.state == "scored" and not sample.greedy]

    @property
    def baseline(self) -> Sample | None:
        """The greedy sample, if the group has one."""
        return next((sample for sample in self.samples if sample.greedy), None)
