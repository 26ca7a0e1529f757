"""Statistics that an algorithm keeps from step to step; a checkpoint contains them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from roll.algorithm.reward_shaping import Floats


@dataclass
class Moments:
    """Running mean and standard deviation of all numbers so far."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared differences from the mean."""

    def add(self, values: Floats) -> None:
        if not len(values):
            return
        mean = float(values[0] + (values - values[0]).mean())  # for equal numbers it is exactly that number
        squares = float(((values - mean) ** 2).sum())
        total, gap = self.count + len(values), mean - self.mean
        self.squares += squares + gap**2 * self.count * len(values) / total
        self.mean += gap * (len(values) / total)
        self.count = total

    @property
    def std(self) -> float:
        """With n - 1; 0 for fewer than two numbers."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0


class RunningScores:
    """Moments per domain, or of everything under one name."""

    def __init__(self) -> None:
        self._by_domain: dict[str, Moments] = {}

    def of(self, domain: str) -> Moments:
        return self._by_domain.setdefault(domain, Moments())

    def state(self) -> dict[str, list[float]]:
        return {domain: [m.count, m.mean, m.squares] for domain, m in self._by_domain.items()}

    def restore(self, state: dict[str, Any]) -> None:
        self._by_domain = {domain: Moments(int(n), mean, squares) for domain, (n, mean, squares) in state.items()}


class AdaptiveKLController:
    """The weight of the KL penalty: fixed, or adapted towards a target (Ziegler et al., 2019, arXiv 1909.08593)."""

    def __init__(self, start: float, target: float | None, horizon: float) -> None:
        self.value = start
        self._target = target
        self._horizon = horizon

    def restore(self, value: float) -> None:
        """Restores the adapted weight of a checkpoint. Without a target the weight is always the config's."""
        if self._target is not None:
            self.value = value

    def observe(self, kl: float, samples: int) -> None:
        """Adapts the weight to the mean KL per token over this many samples."""
        if self._target is not None and math.isfinite(kl):
            error = min(max(kl / self._target - 1, -0.2), 0.2)
            self.value *= 1 + error * samples / self._horizon
