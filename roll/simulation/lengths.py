"""Randomness without a generator: a sample's properties depend only on the seed and its id.

So two schedulers that try the same sample, in any order and on any engine, see the same lengths, the same reward and the
same delays.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from statistics import NormalDist

_NORMAL = NormalDist()


def uniforms(seed: int, key: str) -> tuple[float, ...]:
    """Eight numbers between 0 and 1, exclusive, derived from a seed and a key."""
    digest = hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=64).digest()
    return tuple(((number >> 12) + 0.5) / 2**52 for number in struct.unpack("<8Q", digest))


def normal(uniform: float) -> float:
    """The standard normal quantile of `uniform`."""
    return _NORMAL.inv_cdf(uniform)


def blend(first: float, second: float, share: float) -> float:
    """From two independent standard normal numbers, a third whose correlation with the first is `share`."""
    return share * first + math.sqrt(1 - share * share) * second


def share_below(z: float) -> float:
    """The share of standard normal numbers below z."""
    return _NORMAL.cdf(z)


@dataclass(frozen=True)
class LogNormal:
    """Log-normal positive numbers with the given mean; the right tail grows with `sigma`."""

    mean: float
    sigma: float

    def at(self, z: float) -> float:
        """The value for a standard normal number."""
        return self.mean * math.exp(self.sigma * (z - self.sigma / 2))


@dataclass(frozen=True)
class Lengths:
    """Token counts: log-normal, truncated at a maximum like `max_new_tokens`. Siblings are similar: a share `alike` of
    the variance belongs to the task."""

    mean_tokens: float
    """Mean before truncation."""
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
    """The probability that a task is solved: logistic in its difficulty. The wider the spread, the more tasks are solved
    by all samples or by none and so have no signal."""

    bias: float
    spread: float
    by_length: float
    """Correlation of a task's difficulty with the length of its responses."""

    def probability(self, length_z: float, own_z: float) -> float:
        difficulty = blend(length_z, own_z, self.by_length)
        return 1 / (1 + math.exp(self.spread * difficulty - self.bias))
