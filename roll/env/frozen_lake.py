"""FrozenLake: cross the ice to the goal without falling into a hole. `gymnasium`'s world with its map as text.

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
from roll.env.grid import DIRECTIONS, Cell, GridEnvironment, neighbour, render_grid
from roll.env.resolve import register

_ACTIONS = ("left", "down", "right", "up")
"""In gymnasium's order."""
_DISCOUNT = 0.99
"""Discount per step for the expert on slippery ice: without it, waiting for ever would be as good as moving."""


@register("frozen_lake")
class FrozenLake(GridEnvironment):
    """A random solvable map of `size` × `size` cells, each a hole with probability `holes`. If it is `slippery`, two of
    three moves go to one side of the intended direction. Reaching the goal is worth 1."""

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
        self._set_cell(self._lake.reset(seed=seed)[0])
        slides = " The ice is slippery: you may slide to the left or right of where you want to go." * self._slippery
        return (
            f"You are on a frozen lake. Reach the goal, and do not fall into a hole.{slides}\n"
            f"P is you, . is ice, O is a hole, G is the goal.\n{self.action_help()}\n\n{self.view()}"
        )

    def move(self, direction: str) -> tuple[float, str]:
        before = self._cell
        number, reward, _, _, _ = self._lake.step(_ACTIONS.index(direction))
        self._set_cell(number)
        return float(reward), self._remark(before, direction)

    def view(self) -> str:
        return render_grid([self._symbol((row, column)) for column in range(self._size)] for row in range(self._size))

    def state(self) -> str:
        return f"{self._cell[0]},{self._cell[1]}"

    @property
    def over(self) -> bool:
        return self._letter(self._cell) in "GH"

    @property
    def success(self) -> bool:
        return self._letter(self._cell) == "G"

    def plan(self) -> list[str] | None:
        """The shortest path; on slippery ice only the best next move, since the result of a move is random."""
        if not self._slippery:
            return shortest_path(self._cell, self._neighbours, lambda cell: self._letter(cell) == "G")
        self._choices = self._choices or best_choices(self._lake)
        return [self._choices[self._cell[0] * self._size + self._cell[1]]]

    def _neighbours(self, cell: Cell) -> Iterator[tuple[str, int, Cell]]:
        for direction in DIRECTIONS:
            if self._letter(target := neighbour(cell, direction)) not in ("", "H"):
                yield direction, 1, target

    def _remark(self, before: Cell, direction: str) -> str:
        if self._letter(self._cell) == "H":
            return "You fell into a hole."
        if self.success:
            return "You reached the goal."
        if self._cell == neighbour(before, direction):
            return ""
        if self._cell != before:
            return "You slid."
        return (
            "You did not move: that way is the edge." if not self._letter(neighbour(before, direction)) else "You slid."
        )

    def _letter(self, cell: Cell) -> str:
        row, column = cell
        return self._map[row][column] if 0 <= row < self._size and 0 <= column < self._size else ""

    def _symbol(self, cell: Cell) -> str:
        return "P" if cell == self._cell else {"S": ".", "F": ".", "H": "O", "G": "G"}[self._letter(cell)]

    def _set_cell(self, number: int) -> None:
        self._cell = divmod(int(number), self._size)


def best_choices(lake: FrozenLakeEnv) -> list[str]:
    """The best move in each cell, by value iteration."""
    cells, actions = len(lake.P), len(_ACTIONS)
    expected_rewards = np.zeros((cells, actions))
    transitions = np.zeros((cells, actions, cells))  # transition probabilities to non-final cells
    for cell, by_action in lake.P.items():
        for action, outcomes in by_action.items():
            for probability, target, reward, done in outcomes:
                expected_rewards[cell, action] += probability * reward
                transitions[cell, action, target] += probability * (not done)
    values, change = np.zeros(cells), 1.0
    while change > 1e-9:
        action_values = expected_rewards + _DISCOUNT * transitions @ values  # [cells, actions]
        change = float(np.abs(action_values.max(axis=1) - values).max())
        values = action_values.max(axis=1)
    return [_ACTIONS[action] for action in action_values.argmax(axis=1)]
