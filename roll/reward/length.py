"""`length`: rewards a response of the right length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from roll.data.task import Response, Task

Unit: TypeAlias = Literal["tokens", "words", "characters"]


@dataclass(frozen=True)
class Length:
    """Shaping by length, in one of three ways.

    `target`: 1 at that length, decreasing on both sides to 0 at a distance of `ramp`. `budget`: 1 up to that length, then
    decreasing to 0 over `ramp`. `overlong`: 0 up to `ramp` before that length, then decreasing to -1 at and
    beyond it. With `overlong: 100, ramp: 20` a response of 80 tokens gets 0, one of 90 gets -0.5, one of 100 or 300 gets
    -1.
    """

    target: int = 0
    """The best length."""
    budget: int = 0
    """Length up to which all responses get 1."""
    overlong: int = 0
    """Length from which all responses get -1."""
    ramp: int = 0
    """The length over which the value changes; 0: at once, for `target` the target itself."""
    unit: Unit = "tokens"
    """The unit: `tokens`, `words` or `characters`."""
    deterministic = True
    quick = True

    def __post_init__(self) -> None:
        for name in ("target", "budget", "overlong", "ramp"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, but takes a whole number ≥ 0")
        ways = [name for name in ("target", "budget", "overlong") if getattr(self, name)]
        if len(ways) != 1:
            raise ValueError(f"length takes one of target, budget and overlong, and got {' and '.join(ways) or 'none'}")
        if self.overlong and self.ramp > self.overlong:
            raise ValueError(f"ramp is {self.ramp}, more than overlong={self.overlong}: write a shorter ramp")

    def __call__(self, task: Task, response: Response) -> float:
        length = measure(response, self.unit)
        if self.target:
            return max(0.0, 1 - abs(length - self.target) / (self.ramp or self.target))
        if self.budget:
            beyond = length - self.budget
            return 1.0 if beyond <= 0 else max(0.0, 1 - beyond / self.ramp) if self.ramp else 0.0
        remaining = self.overlong - length
        return -1.0 if remaining <= 0 else min(0.0, remaining / self.ramp - 1) if self.ramp else 0.0


def measure(response: Response, unit: Unit) -> int:
    """The length of a response."""
    if unit == "tokens":
        return response.tokens
    return len(response.text.split()) if unit == "words" else len(response.text)
