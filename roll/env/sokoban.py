"""Sokoban: push every box onto a target. Boxes can be pushed, one at a time, and never pulled.

# # # # # #        # is a wall, . is floor, T is a target, B is a box, * is a box on a target,
# . . T # #        P is you, + is you on a target
# . B . . #
# . P . . #
# # . . # #
# # # # # #
"""

from __future__ import annotations

from roll.env.actions import Format
from roll.env.grid import Cell, GridEnvironment, render_grid
from roll.env.resolve import register
from roll.env.sokoban_levels import Level, check_shape, make_level, solve


@register("sokoban")
class Sokoban(GridEnvironment):
    """A level of `height` × `width` cells, walls included, with `boxes` boxes, that takes `min_pushes` to `max_pushes`
    pushes (0: any number). A move costs `step_cost`; moving a box onto a target earns `box_reward`, moving it off costs
    the same; solving the level earns `done_reward`."""

    def __init__(
        self,
        height: int = 6,
        width: int = 6,
        boxes: int = 1,
        min_pushes: int = 2,
        max_pushes: int = 0,
        step_cost: float = 0.1,
        box_reward: float = 1.0,
        done_reward: float = 10.0,
        moves: int = 1,
        format: Format = "answer",
        invalid_penalty: float = 0.0,
        turns: int = 30,
    ) -> None:
        super().__init__(moves, format, invalid_penalty, turns)
        check_shape(height, width, boxes, min_pushes, max_pushes)
        self._shape = (height, width, boxes, min_pushes, max_pushes)
        self._step_cost, self._box_reward, self._done_reward = step_cost, box_reward, done_reward
        self._level: Level | None = None
        self._plan: list[str] | None = None

    @property
    def level(self) -> Level:
        """The level in its current state."""
        assert self._level is not None, "an environment is reset first"
        return self._level

    def begin(self, seed: int) -> str:
        self._level, self._plan = make_level(seed, *self._shape), None
        return (
            "You are in a warehouse. Push every box onto a target. You can push one box at a time, and pull none.\n"
            "# is a wall, . is floor, T is a target, B is a box, * is a box on a target, P is you, + is you on a target."
            f"\n{self.action_help()}\n\n{self.view()}"
        )

    def move(self, direction: str) -> tuple[float, str]:
        before, after = self.level, self.level.moved(direction)
        self._plan = self._plan[1:] if self._plan and self._plan[0] == direction else None
        if after is None:
            return -self._step_cost, "You did not move: there is a wall or a stuck box that way."
        self._level = after
        gained = len(after.boxes & after.targets) - len(before.boxes & before.targets)
        reward = gained * self._box_reward - self._step_cost
        if after.solved:
            return reward + self._done_reward, "Every box is on a target."
        return reward, "The box is on a target." if gained > 0 else "The box is off its target." if gained < 0 else ""

    def view(self) -> str:
        rows, columns = range(self.level.height), range(self.level.width)
        return render_grid([self._symbol((row, column)) for column in columns] for row in rows)

    def state(self) -> str:
        return f"{self.level.player} {sorted(self.level.boxes)}"

    @property
    def over(self) -> bool:
        return self.level.solved

    @property
    def success(self) -> bool:
        return self.level.solved

    def plan(self) -> list[str] | None:
        self._plan = self._plan or solve(self.level)
        return self._plan

    def _symbol(self, cell: Cell) -> str:
        level = self.level
        if cell not in level.floor:
            return "#"
        on_target = cell in level.targets
        if cell == level.player:
            return "+" if on_target else "P"
        if cell in level.boxes:
            return "*" if on_target else "B"
        return "T" if on_target else "."
