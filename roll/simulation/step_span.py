"""A span of an engine's steps with a constant batch, and the step at a given time."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class StepSpan:
    """Steps of a constant batch: step j ends at `start_s + j × (linear_s + square_s × j)`; the cache grows by the batch
    with each step."""

    entered_s: float
    """When its prefill began."""
    start_s: float
    """When its first step began."""
    batch: int
    linear_s: float
    square_s: float
    steps: int
    """Number of steps until its end."""

    def end_s(self, steps: int) -> float:
        return self.start_s + steps * (self.linear_s + self.square_s * steps)

    def steps_by(self, now_s: float) -> int:
        """Steps that have ended."""
        elapsed = now_s - self.start_s
        if elapsed <= 0:
            return 0
        root = math.sqrt(self.linear_s * self.linear_s + 4 * self.square_s * elapsed)
        steps = int(2 * elapsed / (self.linear_s + root))
        while self.end_s(steps) > now_s:
            steps -= 1
        while self.end_s(steps + 1) <= now_s:
            steps += 1
        return min(steps, self.steps)

    def boundary_from(self, now_s: float) -> int:
        """The first boundary that is not in the past."""
        steps = self.steps_by(now_s)
        return steps if self.end_s(steps) >= now_s else steps + 1
