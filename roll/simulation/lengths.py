"""Chance without a generator: what a sample is like depends on the seed and its id, and on nothing else.

So two schedulers that try the same sample, in whatever order and on whatever engine, see the same lengths, the same
reward and the same delays.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from statistics import NormalDist

_NORMAL = NormalDist()


def uniforms(seed: int, key: str) -> tuple[float, ...]:
    """Eight numbers between 0 and 1, exclusive, that a seed and a key stand for."""
    digest = hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=64).digest()
    return tuple(((number >> 12) + 0.5) / 2**52 for number in struct.unpack("<8Q", digest))


def normal(uniform: float) -> float:
    """The standard normal number below which a share `uniform` of them lies."""
    return _NORMAL.inv_cdf(uniform)


def blend(first: float, second: float, share: float) -> float:
    """Of two independent standard normal numbers a third whose correlation with the first is `share`."""
    return share * first + math.sqrt(1 - share * share) * second


def share_below(z: float) -> float:
    """The share of standard normal numbers below z."""
    return _NORMAL.cdf(z)


@dataclass(frozen=True)
class LogNormal:
    """Positive amounts around a mean, with a tail to the right that grows with `sigma`."""

    mean: float
    sigma: float

    def at(self, z: float) -> float:
        """The amount that a standard normal number stands for."""
        return self.mean * math.exp(self.sigma * (z - self.sigma / 2))


@dataclass(frozen=True)
class Lengths:
    """Token counts: log-normal, cut at a maximum as `max_new_tokens` does. Siblings are alike: a share `alike` of what
    makes a length is the task's."""

    mean_tokens: float
    """Before the cut."""
    sigma: float
    alike: float
    max_tokens: int
    min_tokens: int = 1

    def tokens(self, task_z: float, own_z: float) -> int:
        z = blend(task_z, own_z, math.sqrt(self.alike))
        drawn = self.mean_tokens * math.exp(self.sigma * (z - self.sigma / 2))
        return min(max(round(drawn), self.min_tokens), self.max_tokens)


@dataclass(frozen=True)
class Solving:
    """How likely a task is solved: logistic in its difficulty. The wider the spread, the more tasks are solved by all
    samples or by none and so teach nothing."""

    bias: float
    spread: float
    by_length: float
    """Correlation of a task's difficulty with the length of its responses."""

    def probability(self, length_z: float, own_z: float) -> float:
        difficulty = blend(length_z, own_z, self.by_length)
        return 1 / (1 + math.exp(self.spread * difficulty - self.bias))
