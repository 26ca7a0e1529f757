"""Sokoban rooms: how they are made, and how they are solved.

A room is made by playing backwards from its solution: boxes begin on their targets and are pulled away, so that pushing
them back, in reverse, is a way to solve it. Breadth-first, so that the number of pulls is the least number of pushes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TypeAlias

from roll.env.astar import shortest_path
from roll.env.grid import DIRECTIONS, Cell, beside

Cells: TypeAlias = frozenset[Cell]

_TRIES = 2_000
_MOST_STATES = 2_000
"""States that are looked at on the way back from a solution. One box in a small room has fewer."""
_STRAIGHT_ON = 0.65
"""How often the walk that makes the floor keeps its direction."""


@dataclass(frozen=True)
class Level:
    """A room at a moment. All that is not floor is wall."""

    height: int
    width: int
    floor: Cells
    targets: Cells
    boxes: Cells
    player: Cell

    @property
    def solved(self) -> bool:
        return self.boxes == self.targets

    def moved(self, direction: str) -> Level | None:
        """The room after a move, which pushes a box that is in the way; None where something stands in the way."""
        there = beside(self.player, direction)
        if there not in self.floor:
            return None
        if there not in self.boxes:
            return replace(self, player=there)
        behind = beside(there, direction)
        if behind not in self.floor or behind in self.boxes:
            return None
        return replace(self, player=there, boxes=(self.boxes - {there}) | {behind})

    @cached_property
    def distances(self) -> dict[Cell, int]:
        """How many pushes a box needs from a cell to its nearest target, if nothing else is in the way; cells from which
        it cannot get there have none."""
        return _push_distances(self.floor, self.targets)


def check_shape(height: int, width: int, boxes: int, min_pushes: int, max_pushes: int) -> None:
    """`ValueError` where there is no such room."""
    inside = (height - 2) * (width - 2)
    if min(height, width) < 3 or boxes < 1 or inside < 2 * boxes + 1:
        raise ValueError(
            f"sokoban: boxes={boxes} in a room of height={height}, width={width}, walls included: write 1 or more, "
            "as many as leave room to push them"
        )
    if min_pushes < 1 or 0 < max_pushes < min_pushes:
        raise ValueError(f"sokoban: min_pushes={min_pushes}, max_pushes={max_pushes}: write 1 or more, and no less")


@lru_cache(maxsize=256)
def make_room(
    seed: int, height: int = 6, width: int = 6, boxes: int = 1, min_pushes: int = 2, max_pushes: int = 0
) -> Level:
    """The room of that seed, with every box off its target. Solving it takes `min_pushes` or more and, unless that is 0,
    no more than `max_pushes`: any such number is as likely as another, if there are rooms of it."""
    check_shape(height, width, boxes, min_pushes, max_pushes)
    noise = random.Random(f"sokoban/{seed}/{height}/{width}/{boxes}")
    for _ in range(_TRIES):
        room = _played_back(noise, height, width, _floor(noise, height, width), boxes, min_pushes, max_pushes)
        if room is not None:
            return room
    raise ValueError(
        f"sokoban: no room of {height} × {width} with {boxes} boxes takes {min_pushes} to {max_pushes or 'any'} pushes: "
        "write a larger room, fewer boxes or a smaller min_pushes"
    )


def solve(room: Level, most_states: int = 100_000) -> list[str] | None:
    """A shortest way to solve the room, in moves; None if there is none, or none was found within `most_states`."""

    def pushes(state: tuple[Cells, Cell]) -> Iterator[tuple[list[str], int, tuple[Cells, Cell]]]:
        boxes, player = state
        ways = _ways(room.floor - boxes, player)
        for box in sorted(boxes):
            for direction in DIRECTIONS:
                stand, there = beside(box, direction, -1), beside(box, direction)
                if stand in ways and there in room.distances and there not in boxes:
                    path = [*_path(ways, stand), direction]
                    yield path, len(path), ((boxes - {box}) | {there}, box)

    def at_least(state: tuple[Cells, Cell]) -> int:
        return sum(room.distances[box] for box in state[0])

    if not all(box in room.distances for box in room.boxes):
        return None
    start = (room.boxes, room.player)
    found = shortest_path(start, pushes, lambda state: state[0] == room.targets, at_least, most_states)
    return None if found is None else [move for path in found for move in path]


def _floor(noise: random.Random, height: int, width: int) -> Cells:
    """What a walk leaves behind that turns now and then: connected, with corners and corridors."""
    inside = [(row, column) for row in range(1, height - 1) for column in range(1, width - 1)]
    wanted = round(len(inside) * noise.uniform(0.5, 0.95))
    cell, direction = noise.choice(inside), noise.choice(list(DIRECTIONS))
    floor = {cell}
    while len(floor) < wanted:
        if noise.random() > _STRAIGHT_ON:
            direction = noise.choice(list(DIRECTIONS))
        there = beside(cell, direction)
        if 0 < there[0] < height - 1 and 0 < there[1] < width - 1:
            cell = there
            floor.add(cell)
        else:
            direction = noise.choice(list(DIRECTIONS))
    return frozenset(floor)


def _played_back(
    noise: random.Random, height: int, width: int, floor: Cells, boxes: int, min_pushes: int, max_pushes: int
) -> Level | None:
    if len(floor) < 2 * boxes + 1:
        return None
    targets = frozenset(noise.sample(sorted(floor), boxes))
    by_pushes: dict[int, list[tuple[Cells, Cells]]] = {}
    for pushes, placed, region in _pulled(floor, targets):
        if pushes >= min_pushes and not placed & targets:
            by_pushes.setdefault(pushes, []).append((placed, region))
        if max_pushes and pushes > max_pushes:
            break
    chosen = [pushes for pushes in by_pushes if not max_pushes or pushes <= max_pushes]
    if not chosen:
        return None
    placed, region = noise.choice(by_pushes[noise.choice(chosen)])
    return Level(height, width, floor, targets, placed, noise.choice(sorted(region)))


def _pulled(floor: Cells, targets: Cells) -> Iterator[tuple[int, Cells, Cells]]:
    """The ways in which boxes can be pulled off the targets, with the number of pulls, fewest first: where the boxes are,
    and the region that the player is in, all of which is the same to it."""
    layer = [(targets, region) for region in _regions(floor - targets)]
    seen: dict[Cells, list[Cells]] = {targets: [region for _, region in layer]}
    pulls, states = 0, len(layer)
    while layer:
        following: list[tuple[Cells, Cells]] = []
        for boxes, region in layer:
            yield pulls, boxes, region
            for pulled, player in _pulls(floor, boxes, region):
                known = seen.setdefault(pulled, [])
                if states < _MOST_STATES and not any(player in region for region in known):
                    known.append(frozenset(_ways(floor - pulled, player)))
                    following.append((pulled, known[-1]))
                    states += 1
        layer, pulls = following, pulls + 1


def _pulls(floor: Cells, boxes: Cells, region: Cells) -> Iterator[tuple[Cells, Cell]]:
    for box in sorted(boxes):
        for direction in DIRECTIONS:
            stand, there = beside(box, direction), beside(box, direction, 2)
            if stand in region and there in floor and there not in boxes:
                yield (boxes - {box}) | {stand}, there


def _regions(free: Cells) -> list[Cells]:
    regions: list[Cells] = []
    left = set(free)
    for cell in sorted(free):
        if cell in left:
            regions.append(frozenset(_ways(free, cell)))
            left -= regions[-1]
    return regions


def _ways(free: Cells, start: Cell) -> dict[Cell, tuple[Cell, str] | None]:
    """Every cell that can be walked to, with the last step of a shortest way there."""
    ways: dict[Cell, tuple[Cell, str] | None] = {start: None}
    layer = [start]
    while layer:
        following: list[Cell] = []
        for cell in layer:
            for direction in DIRECTIONS:
                there = beside(cell, direction)
                if there in free and there not in ways:
                    ways[there] = (cell, direction)
                    following.append(there)
        layer = following
    return ways


def _path(ways: dict[Cell, tuple[Cell, str] | None], cell: Cell) -> list[str]:
    path: list[str] = []
    while (step := ways[cell]) is not None:
        cell, direction = step
        path.append(direction)
    return path[::-1]


def _push_distances(floor: Cells, targets: Cells) -> dict[Cell, int]:
    distances = dict.fromkeys(targets, 0)
    layer = sorted(targets)
    while layer:
        following: list[Cell] = []
        for cell in layer:
            for direction in DIRECTIONS:
                before, stand = beside(cell, direction, -1), beside(cell, direction, -2)
                if before in floor and stand in floor and before not in distances:
                    distances[before] = distances[cell] + 1
                    following.append(before)
        layer = following
    return distances
