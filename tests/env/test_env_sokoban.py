"""Sokoban: rooms that can be solved, its rules and rewards, and a solver held against a plain search."""

from __future__ import annotations

from collections import deque

import pytest

from roll.env.base import parse_reset, parse_step
from roll.env.grid import DIRECTIONS
from roll.env.sokoban import Sokoban
from roll.env.sokoban_levels import Cells, Level, make_level, solve

SIZES = [(6, 6, 1, 250), (5, 7, 1, 60), (6, 6, 2, 100), (8, 8, 2, 30), (10, 10, 3, 4)]


def level_of(text: str) -> Level:
    cells = {(r, c): symbol for r, row in enumerate(text.split("\n")) for c, symbol in enumerate(row.split())}

    def where(symbols: str) -> Cells:
        return frozenset(cell for cell, symbol in cells.items() if symbol in symbols)

    (player,) = where("P+")
    height, width = max(r for r, _ in cells) + 1, max(c for _, c in cells) + 1
    return Level(height, width, where(".TB*P+"), where("T*+"), where("B*"), player)


def world(text: str, **options: object) -> Sokoban:
    made = Sokoban(**options)  # type: ignore[arg-type]
    made.reset(0)
    made._level = level_of(text)
    return made


def plain_search(start: Level) -> int | None:
    """The fewest moves, found without any cleverness."""
    queue, seen = deque([(start, 0)]), {(start.player, start.boxes)}
    while queue:
        now, moves = queue.popleft()
        if now.solved:
            return moves
        for direction in DIRECTIONS:
            after = now.moved(direction)
            if after is not None and (after.player, after.boxes) not in seen:
                seen.add((after.player, after.boxes))
                queue.append((after, moves + 1))
    return None


@pytest.mark.parametrize(("height", "width", "boxes", "count"), SIZES)
def test_every_level_can_be_solved_in_as_many_pushes_as_were_requested(
    height: int, width: int, boxes: int, count: int
) -> None:
    for seed in range(count):
        made = make_level(seed, height, width, boxes, 2, 5)
        assert len(made.boxes) == len(made.targets) == boxes
        assert made.boxes | made.targets | {made.player} <= made.floor
        assert not made.boxes & made.targets
        assert made.player not in made.boxes
        assert all(0 < row < height - 1 and 0 < column < width - 1 for row, column in made.floor)
        moves = solve(made)
        assert moves is not None
        now, pushes = made, 0
        for move in moves:
            after = now.moved(move)
            assert after is not None
            now, pushes = after, pushes + (after.boxes != now.boxes)
        assert now.solved
        assert pushes >= 2


def test_the_solver_finds_the_shortest_way_or_that_there_is_none() -> None:
    lost = 0
    for seed in range(120):
        start = make_level(seed, 6, 6, 1 + seed % 2)
        for direction in [*DIRECTIONS, "none"]:  # also from rooms that one wrong move has made
            now = start if direction == "none" else start.moved(direction)
            if now is None:
                continue
            found, fewest = solve(now), plain_search(now)
            assert (None if found is None else len(found)) == fewest
            lost += fewest is None
    assert lost > 5, "some of them were lost"


def test_no_level_takes_more_pushes_than_requested() -> None:
    def fewest_pushes(start: Level) -> int:
        best, queue = {(start.player, start.boxes): 0}, deque([(start, 0)])
        while queue:
            now, pushes = queue.popleft()
            if pushes > best[now.player, now.boxes]:
                continue
            for direction in DIRECTIONS:
                after = now.moved(direction)
                if after is None:
                    continue
                total = pushes + (after.boxes != now.boxes)
                if total < best.get((after.player, after.boxes), 99):
                    best[after.player, after.boxes] = total
                    queue.append((after, total))
        return min(pushes for (_, boxes), pushes in best.items() if boxes == start.targets)

    seen = {fewest_pushes(make_level(seed, 6, 6, 1, 2, 4)) for seed in range(60)}
    assert seen == {2, 3, 4}
    assert {fewest_pushes(make_level(seed, 6, 6, 1, 3, 3)) for seed in range(20)} == {3}


def test_levels_come_from_the_seed() -> None:
    make_level.cache_clear()
    rooms = [make_level(seed) for seed in range(100)]
    make_level.cache_clear()
    assert rooms == [make_level(seed) for seed in range(100)]
    assert len({str(one) for one in rooms}) == 100


def test_a_level_is_the_same_in_every_version() -> None:
    assert Sokoban().reset(3)[0].rpartition("\n\n")[2] == KNOWN


KNOWN = """
# # # # # #
# . # # . #
# . . . . #
# . B . T #
# . # # P #
# # # # # #""".strip()

SMALL = """
# # # # # #
# P B T . #
# . . . T #
# . B . . #
# # # # # #""".strip()


def test_the_rules_the_rewards_and_what_is_said() -> None:
    game = world(SMALL, boxes=2)
    assert game.view() == SMALL
    first = game.step("<answer>right</answer>")
    assert first.reward == pytest.approx(0.9)
    assert str(first.observation).startswith("The box is on a target.\n\n# # # # # #\n# . P * . #")
    off = game.step("<answer>right</answer>")
    assert off.reward == pytest.approx(-1.1)
    assert str(off.observation).startswith("The box is off its target.\n\n# # # # # #\n# . . + B #")
    wall = game.step("<answer>right</answer>")
    assert wall.reward == pytest.approx(-0.1)
    assert str(wall.observation).startswith("You did not move: there is a wall or a stuck box that way.")
    assert game.expert() is None, "a box in a corner that is no target"
    assert game.step("<answer>push</answer>").info == {
        "invalid": 1,
        "success": 0,
        "state": game.state(),
    }


def test_all_boxes_on_targets_is_the_end() -> None:
    game = world(SMALL.replace("B . . #\n# # #", ". . . #\n# # #").replace(". T #", ". . #"))
    done = game.step("<answer>right</answer>")
    assert done.reward == pytest.approx(10.9)
    assert (done.terminated, done.info["success"]) == (True, 1.0)
    assert game.expert() is None


def test_two_boxes_in_a_row_do_not_move() -> None:
    game = world("# # # # # #\n# P B B T #\n# . . . T #\n# # # # # #")
    assert game.level.moved("right") is None
    assert game.step("<answer>right</answer>").reward == pytest.approx(-0.1)


@pytest.mark.parametrize("moves", [1, 4])
def test_the_expert_solves_it_and_finds_its_way_back(moves: int) -> None:
    for seed in range(60):
        game = Sokoban(moves=moves, turns=0)
        parse_reset(game.reset(seed))
        before = len(solve(game.level) or ())
        free = [move for move in DIRECTIONS if (after := game.level.moved(move)) and after.boxes == game.level.boxes]
        if free:
            game.expert()
            parse_step(game.step(game.format_action(free[0])))
        turns = 0
        while (action := game.expert()) is not None:
            step = parse_step(game.step(action))
            turns += 1
        assert step.terminated
        assert turns <= -(-(before + 1) // moves)


def test_turns_are_limited() -> None:
    game = Sokoban(turns=2)
    game.reset(0)
    assert not game.step("?").truncated
    last = game.step("?")
    assert (last.truncated, last.terminated, last.info["success"]) == (True, False, 0.0)


@pytest.mark.parametrize(
    "options",
    [
        {"height": 2},
        {"boxes": 0},
        {"boxes": 8},
        {"min_pushes": 0},
        {"min_pushes": 3, "max_pushes": 2},
        {"min_pushes": 99},
    ],
)
def test_levels_that_cannot_be_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="write"):
        Sokoban(**options).reset(0)  # type: ignore[arg-type]
