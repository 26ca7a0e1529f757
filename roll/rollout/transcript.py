"""A transcript: what happened in one attempt, as text, with who said what and what of it would be trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from roll.data.sample import Sample
from roll.data.tokenlog import IntArray, Kind


@dataclass(frozen=True)
class Passage:
    """Tokens of one kind in a row, special ones shown."""

    kind: Kind
    text: str
    tokens: int
    forks: bool = False
    """It begins a branch: nothing before it is seen from here on."""
    reward: float | None = None
    """What the environment gave for this response."""

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
    """Of the reward."""


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
