"""FrozenLake: over the ice to the goal, past the holes. The world is `gymnasium`'s; the map is drawn as text.

P . . .        P is you, . is ice, O is a hole, G is the goal
. O . O
. . . O
O . . G
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

from roll.env.actions import Format
from roll.env.astar import shortest_path
from roll.env.grid import DIRECTIONS, Cell, GridEnvironment, beside, drawn
from roll.env.resolve import register

_ACTIONS = ("left", "down", "right", "up")
"""As gymnasium numbers them."""
_DISCOUNT = 0.99
"""Of a step's delay, for the expert on slippery ice: without it, one that waits for ever does no worse."""


@register("frozen_lake")
class FrozenLake(GridEnvironment):
    """A random map that can be solved, `size` cells wide and high, each of them a hole with probability `holes`. Where it
    is `slippery`, two moves of three go to one side of where they should. The goal is worth 1."""

    def __init__(
        self,
        size: int = 4,
        holes: float = 0.2,
        slippery: bool = False,
        moves: int = 1,
        format: Format = "answer",
        invalid_penalty: float = 0.0,
        turns: int = 0,
    ) -> None:
        super().__init__(moves, format, invalid_penalty, turns)
        if size < 2 or not 0 <= holes < 1:
            raise ValueError(
                f"frozen_lake: size={size}, holes={holes}: write a size of 2 or more, holes from 0 to below 1"
            )
        self._size, self._holes, self._slippery = size, holes, slippery
        self._map: list[str] = []
        self._cell: Cell = (0, 0)
        self._choices: list[str] = []

    def begin(self, seed: int) -> str:
        self._map = generate_random_map(self._size, 1 - self._holes, seed)
        self._lake = FrozenLakeEnv(desc=self._map, is_slippery=self._slippery)
        self._choices = []
        self._stand(self._lake.reset(seed=seed)[0])
        slides = " The ice is slippery: you may slide to the left or right of where you want to go." * self._slippery
        return (
            f"You are on a frozen lake. Reach the goal, and do not fall into a hole.{slides}\n"
            f"P is you, . is ice, O is a hole, G is the goal.\n{self.how()}\n\n{self.view()}"
        )

    def move(self, direction: str) -> tuple[float, str]:
        before = self._cell
        number, reward, _, _, _ = self._lake.step(_ACTIONS.index(direction))
        self._stand(number)
        return float(reward), self._remark(before, direction)

    def view(self) -> str:
        return drawn([self._symbol((row, column)) for column in range(self._size)] for row in range(self._size))

    def state(self) -> str:
        return f"{self._cell[0]},{self._cell[1]}"

    @property
    def over(self) -> bool:
        return self._letter(self._cell) in "GH"

    @property
    def success(self) -> bool:
        return self._letter(self._cell) == "G"

    def plan(self) -> list[str] | None:
        """The shortest way; on slippery ice the one move that is best, since none can be foreseen after it."""
        if not self._slippery:
            return shortest_path(self._cell, self._ways, lambda cell: self._letter(cell) == "G")
        self._choices = self._choices or best_choices(self._lake)
        return [self._choices[self._cell[0] * self._size + self._cell[1]]]

    def _ways(self, cell: Cell) -> Iterator[tuple[str, int, Cell]]:
        for direction in DIRECTIONS:
            if self._letter(there := beside(cell, direction)) not in ("", "H"):
                yield direction, 1, there

    def _remark(self, before: Cell, direction: str) -> str:
        if self._letter(self._cell) == "H":
            return "You fell into a hole."
        if self.success:
            return "You reached the goal."
        if self._cell == beside(before, direction):
            return ""
        if self._cell != before:
            return "You slid."
        return "You did not move: that way is the edge." if not self._letter(beside(before, direction)) else "You slid."

    def _letter(self, cell: Cell) -> str:
        row, column = cell
        return self._map[row][column] if 0 <= row < self._size and 0 <= column < self._size else ""

    def _symbol(self, cell: Cell) -> str:
        return "P" if cell == self._cell else {"S": ".", "F": ".", "H": "O", "G": "G"}[self._letter(cell)]

    def _stand(self, number: int) -> None:
        self._cell = divmod(int(number), self._size)


def best_choices(lake: FrozenLakeEnv) -> list[str]:
    """The best move in each cell, by value iteration."""
    cells, actions = len(lake.P), len(_ACTIONS)
    gain = np.zeros((cells, actions))
    goes = np.zeros((cells, actions, cells))  # the chance to go on from there
    for cell, by_action in lake.P.items():
        for action, ways in by_action.items():
            for chance, there, reward, done in ways:
                gain[cell, action] += chance * reward
                goes[cell, action, there] += chance * (not done)
    values, change = np.zeros(cells), 1.0
    while change > 1e-9:
        worth = gain + _DISCOUNT * goes @ values  # [cells, actions]
        change = float(np.abs(worth.max(axis=1) - values).max())
        values = worth.max(axis=1)
    return [_ACTIONS[action] for action in worth.argmax(axis=1)]
