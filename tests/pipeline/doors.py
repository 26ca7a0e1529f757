"""Three turns to get through two doors: a world in which different paths meet in the same state."""

from __future__ import annotations

import random

from roll.env import Environment, Step

OPENS = {"0": str.isdigit, "a": str.islower}
"""What a door shows, and what it opens to."""


class Doors(Environment):
    """A wrong word leaves you where you are, so that whoever stands before the second door has the same ahead, however
    many tries the first one took. Each door that opens is worth a half."""

    def __init__(self) -> None:
        self._row: list[str] = []
        self._opened, self._turns = 0, 3

    def reset(self, seed: int) -> tuple[str, dict[str, str]]:
        self._row = random.Random(seed).choices(list(OPENS), k=2)
        return self._row[0], {"state": "before the first"}

    def step(self, action: str) -> Step:
        self._turns -= 1
        right = OPENS[self._row[self._opened]](action)
        self._opened += right
        if self._opened == 2 or not self._turns:
            return Step("", right / 2, terminated=True)
        state = "before the second" if self._opened else "before the first"
        return Step(self._row[self._opened], right / 2, info={"state": state})
