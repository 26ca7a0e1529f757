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
    priority: int = 0
    """Those with a higher one go first."""
    greedy: bool = False
    """Drawn at temperature 0: its reward is what its siblings' are compared with, and it is not trained on."""
    records: bool = True
    """Whether engines record which experts its tokens were sent to: the trainer replays them."""
    tries: int = 1
    """Attempts so far: above 1 a worker died or hung under it."""
    kills: float = 0.0
    """Graders and environment processes it has crashed or hung; a part of one that several may have crashed."""
    ended: str = ""
    """Why its response was ended early."""
    turns: int = 0
    """Responses so far."""
    oldest: int | None = None
    """Version of the weights that drew, or may have drawn, its first token; None before it has an engine."""
    newest: int | None = None
    """Version that drew its last token."""
    response: Response | None = None
    """As its grader sees it; None on the controller, like its tokens."""
    tokens: int = 0
    response_tokens: int = 0
    finish: str | None = None
    reward: float = 0.0
    turn_rewards: list[float] = field(default_factory=list)
    """What each turn earned in its environment; empty without one."""
    turn_states: list[int] = field(default_factory=list)
    """What the environment was like before each turn: equal numbers are equal states."""
    parts: dict[str, float] = field(default_factory=dict)
    votes: bool = False
    """Whether its answer is asked for, to be counted with those of other attempts at its task."""
    answer: str | None = None
    """What its grader read from its response, if it was asked."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Spent in each state."""
    entered_s: float = 0.0
    """When it came into its state, in seconds since the epoch."""


@dataclass
class Group:
    """The samples of one task that are scored against each other, issued together under one index."""

    index: int
    task: Task
    samples: list[Sample]
    epoch: int = 0
    priority: int = 0
    version: int = 0
    """Of the weights, when it was issued."""

    @property
    def oldest(self) -> int | None:
        """Version of the oldest token to train on; None while none can have been drawn."""
        return min((s.oldest for s in self.samples if s.oldest is not None and not s.greedy), default=None)

    @property
    def scored(self) -> list[Sample]:
        """Those to train on."""
        return [sample for sample in self.samples if sample.state == "scored" and not sample.greedy]

    @property
    def baseline(self) -> Sample | None:
        """The greedy one, if the group has one."""
        return next((sample for sample in self.samples if sample.greedy), None)
