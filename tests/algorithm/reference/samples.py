"""A step as the references see it: samples of different lengths, their sampled tokens and their turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Level = Literal["token", "turn", "sequence"]
Rows = list[list[float]]
"""One number for every sampled token of every sample."""


@dataclass(frozen=True)
class RefToken:
    """One sampled token: its log-probability four times, the value before it, the entropy there and its turn."""

    cur: float
    prox: float
    beh: float
    ref: float
    value: float = 0.0
    entropy: float = 0.0
    turn: int = 0


@dataclass(frozen=True)
class RefSample:
    """One attempt at the task of its group. `baseline` is the reward of the task's greedy answer (ReMax).

    `turn_rewards` and `turn_states` are empty where turns are not rewarded; else they have one entry a turn.
    """

    group: int
    reward: float
    response_tokens: tuple[RefToken, ...]
    domain: str = ""
    baseline: float = 0.0
    truncated: bool = False
    turn_rewards: tuple[float, ...] = ()
    turn_states: tuple[str, ...] = ()
    weight: float = 1.0

    @property
    def trained(self) -> bool:
        return self.weight == 1.0 and len(self.response_tokens) > 0

    def with_current(self, cur: Sequence[float]) -> RefSample:
        tokens = zip(self.response_tokens, cur, strict=True)
        return replace(self, response_tokens=tuple(replace(token, cur=value) for token, value in tokens))


def unit(sample: RefSample, t: int, level: Level) -> list[int]:
    """The positions that share one ratio with token t: itself, its turn's tokens, or all of the sample's."""
    tokens = sample.response_tokens
    match level:
        case "token":
            return [t]
        case "turn":
            return [u for u in range(len(tokens)) if tokens[u].turn == tokens[t].turn]
        case "sequence":
            return list(range(len(tokens)))


def trained_tokens(samples: Sequence[RefSample]) -> Iterator[tuple[int, int]]:
    """(sample, position) of every sampled token that is trained on."""
    for i, sample in enumerate(samples):
        if sample.trained:
            for t in range(len(sample.response_tokens)):
                yield i, t
