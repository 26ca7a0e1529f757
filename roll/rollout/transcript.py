"""Transcripts: one sample as text, with the kind of each passage and whether training uses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from roll.data.sample import Sample
from roll.data.tokenlog import IntArray, Kind


@dataclass(frozen=True)
class Passage:
    """Consecutive tokens of one kind as text, including special tokens."""

    kind: Kind
    text: str
    tokens: int
    forks: bool = False
    """It begins a branch: the model does not see the passages before it from here on."""
    reward: float | None = None
    """The environment's reward for this response."""

    @property
    def is_trained(self) -> bool:
        return self.kind == "response"


@dataclass(frozen=True)
class Transcript:
    sample: str
    task: str
    domain: str
    state: str
    """`scored`, or `failed`."""
    reason: str
    """Why it failed, or was ended early."""
    finish: str | None
    reward: float
    passages: tuple[Passage, ...]
    parts: dict[str, float] = field(default_factory=dict)
    """The parts of the reward, by name."""


def transcript_of(sample: Sample, decode: Callable[[IntArray], str]) -> Transcript:
    passages: list[Passage] = []
    turn = 0
    for number, segment in enumerate(sample.log.segments):
        reward = None
        if segment.kind == "response":
            reward = sample.turn_rewards[turn] if turn < len(sample.turn_rewards) else None
            turn += 1
        forks = segment.kind == "prompt" and number > 0
        passages.append(Passage(segment.kind, decode(segment.ids), len(segment.ids), forks, reward))
    return Transcript(
        sample.id,
        sample.task.id,
        sample.task.domain,
        sample.state,
        sample.reason or sample.ended,
        sample.finish,
        sample.reward,
        tuple(passages),
        dict(sample.parts),
    )
