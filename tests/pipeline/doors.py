"""Three turns to get through a row of doors: a world in which different paths meet in the same state."""

from __future__ import annotations

import random

from roll.env import Environment, Step


class Doors(Environment):
    """Each door shows a symbol and opens to it. A wrong word leaves you where you are, so that whoever stands before the
    second door has the same ahead, however many tries the first one took. Each door opened is worth its share of 1."""

    def __init__(self, doors: int = 2, turns: int = 3, symbols: str = "01") -> None:
        self._doors, self._turns, self._symbols = doors, turns, symbols
        self._row: list[str] = []
        self._opened = 0

    def reset(self, seed: int) -> tuple[str, dict[str, str]]:
        self._row = random.Random(seed).choices(self._symbols, k=self._doors)
        return self._row[0], {"state": "door 0"}

    def step(self, action: str) -> Step:
        self._turns -= 1
        right = action == self._row[self._opened]
        self._opened += right
        reward = right / self._doors
        if self._opened == self._doors or not self._turns:
            return Step("", reward, terminated=True)
        return Step(self._row[self._opened], reward, info={"state": f"door {self._opened}"})
