"""Grid worlds in which an agent moves up, down, left and right."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import ClassVar, TypeAlias

from roll.env.actions import ActingEnvironment, Action, Format, Invalid, Tool
from roll.env.base import Step

Cell: TypeAlias = tuple[int, int]
"""Row and column, from the top left."""

DIRECTIONS: Mapping[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
_WORD = re.compile(r"[^\W\d_]+")


def neighbour(cell: Cell, direction: str, steps: int = 1) -> Cell:
    """The cell `steps` steps away."""
    down, right = DIRECTIONS[direction]
    return cell[0] + steps * down, cell[1] + steps * right


def render_grid(rows: Iterable[Iterable[str]]) -> str:
    """A grid as text. Spaces between cells make tokenizers keep them apart."""
    return "\n".join(" ".join(row) for row in rows)


class GridEnvironment(ActingEnvironment):
    """An action is one move, or up to `moves` of them in a row, executed until one ends the episode.

    A subclass implements `move`, `over`, `success` and `plan`. The expert says as many moves of the plan as fit in an
    action.
    """

    tool: ClassVar[Tool] = Tool("move", "direction", "Move one cell: up, down, left or right.")

    def __init__(self, moves: int, format: Format, invalid_penalty: float, turns: int) -> None:
        super().__init__(format, invalid_penalty, turns)
        if moves < 1:
            raise ValueError(f"{type(self).__name__}: moves is {moves}: write how many an action may have, 1 or more")
        self._moves = moves

    @abstractmethod
    def move(self, direction: str) -> tuple[float, str]:
        """Moves there; returns the reward, and a remark for the agent or ""."""

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether the episode is over."""

    @property
    @abstractmethod
    def success(self) -> bool:
        """Whether the task is solved."""

    @abstractmethod
    def plan(self) -> list[str] | None:
        """The best moves from here; None if no moves lead to the goal."""

    def expert(self) -> str | None:
        """The next action; None if the task can no longer be solved."""
        plan = None if self.over else self.plan()
        return self.format_action(", ".join(plan[: self._moves])) if plan else None

    def action_help(self) -> str:
        """One line of instructions about actions."""
        listed = ", ".join(list(DIRECTIONS)[:-1]) + f" or {list(DIRECTIONS)[-1]}"
        if self._moves == 1:
            return f"Each turn, say one move, {listed}, like this: {self.format_action('down')}"
        example = ", ".join(["down", "right", "right", "up"][: min(self._moves, 3)])
        return f"Each turn, say up to {self._moves} moves, each {listed}, like this: {self.format_action(example)}"

    def act(self, action: Action) -> Step | Invalid:
        words = _WORD.findall(action.text.lower())
        unknown = next((word for word in words if word not in DIRECTIONS), None)
        if unknown is not None or not words:
            return Invalid(f"{(unknown or action.text)[:40]!r} is no move. {self.action_help()}")
        if len(words) > self._moves:
            return Invalid(f"these are {len(words)} moves at once. {self.action_help()}")
        total, remarks = 0.0, []
        for word in words:
            reward, remark = self.move(word)
            total += reward
            remarks += [remark] * bool(remark)
            if self.over:
                break
        return Step("\n\n".join([*remarks, self.view()]), total, terminated=self.over)

    def read(self, text: str) -> str | Invalid:
        """The last move in the text; if an action may have several, the moves of the last line that has any."""
        lines = [[word for word in _WORD.findall(line.lower()) if word in DIRECTIONS] for line in text.splitlines()]
        found = next((words for words in reversed(lines) if words), None)
        if found is None:
            return Invalid(f"there is no move in what you said. {self.action_help()}")
        return found[-1] if self._moves == 1 else ", ".join(found)

    def extra_info(self) -> dict[str, float | str]:
        return {"success": float(self.success)}
