"""Environments: how long a step takes. Every sample has its own environment, so that they never wait for each other."""

from __future__ import annotations

from dataclasses import dataclass

from roll.simulation.lengths import LogNormal, normal


@dataclass(frozen=True)
class EnvironmentSteps:
    """Mostly `usual`; a share of the steps are stragglers, slower by a factor: a page that hangs, a cold start."""

    usual: LogNormal
    straggler_share: float = 0.01
    straggler_factor: float = 50.0

    def seconds(self, latency_uniform: float, straggler_uniform: float) -> float:
        usual_s = self.usual.at(normal(latency_uniform))
        return usual_s * self.straggler_factor if straggler_uniform < self.straggler_share else usual_s
