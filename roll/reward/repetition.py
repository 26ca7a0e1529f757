"""`repetition`: a penalty for repeated text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from roll.data.task import Response, Task


@dataclass(frozen=True)
class RepetitionPenalty:
    """0 for a text without repetition, down to -1: minus the share of its n-grams that occurred before."""

    n: int = 4
    """Words or characters in an n-gram; a shorter text gets 0."""
    allowed: float = 0.0
    """Share of repeated n-grams without a penalty; above it, the whole share counts."""
    unit: Literal["words", "characters"] = "words"
    """The unit of n-grams: `words`, or `characters` for languages without spaces."""
    deterministic = True
    quick = True

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n is {self.n}, but takes a whole number ≥ 1")
        if not 0 <= self.allowed <= 1:
            raise ValueError(f"allowed is {self.allowed:g}, but takes a number from 0 to 1")

    def __call__(self, task: Task, response: Response) -> float:
        text = response.text.casefold()
        share = repeated_share(re.findall(r"\w+", text) if self.unit == "words" else list("".join(text.split())), self.n)
        return -share if share > self.allowed else 0.0


def repeated_share(items: list[str], n: int) -> float:
    """Share of n-grams that occurred before: in `a b a b a` with n = 2, two of four."""
    count = len(items) - n + 1
    if count < 1:
        return 0.0
    grams = zip(*(items[first:] for first in range(n)), strict=False)
    return 1 - len(set(grams)) / count
