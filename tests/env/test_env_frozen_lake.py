"""FrozenLake: its maps, what it says, and its expert against another way to find the best moves."""

from __future__ import annotations

import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

from roll.env.base import Step, parse_reset, parse_step
from roll.env.frozen_lake import FrozenLake, best_choices
from roll.env.state_key import state_of


def on(rows: list[str], **options: object) -> FrozenLake:
    """The environment on a map of one's own."""
    world = FrozenLake(size=len(rows), **options)  # type: ignore[arg-type]
    world.reset(0)
    world._map = rows
    world._lake = FrozenLakeEnv(desc=rows, is_slippery=world._slippery)
    world._set_cell(world._lake.reset(seed=0)[0])
    return world


def played(world: FrozenLake, seed: int, most: int = 300) -> list[Step]:
    """The expert's episode."""
    parse_reset(world.reset(seed))
    steps: list[Step] = []
    while not (steps and steps[-1].done) and len(steps) < most:
        action = world.expert()
        assert action is not None
        steps.append(parse_step(world.step(action)))
    return steps


MAP = ["SFFF", "FHFH", "FFFH", "HFFG"]


def test_what_is_shown() -> None:
    text, info = FrozenLake().reset(5)
    assert text.count("P") == 2, "in the grid, and in the legend"
    assert "like this: <answer>down</answer>\n\n" in text
    assert info == {"state": "0,0"}
    world = on(MAP)
    assert world.view() == "P . . .\n. O . O\n. . . O\nO . . G"
    assert world.step("<answer>right</answer>").observation == ". P . .\n. O . O\n. . . O\nO . . G"
    assert '{"name": "move", "arguments": {"direction": "down"}}' in FrozenLake(format="json").reset(0)[0]
    assert "say up to 2 moves" in FrozenLake(moves=2).reset(0)[0]
    assert "slippery" in FrozenLake(slippery=True).reset(0)[0]


def test_moves_and_what_they_lead_to() -> None:
    world = on(MAP)
    step = world.step("<answer>up</answer>")
    assert (step.reward, step.done) == (0.0, False)
    assert str(step.observation).startswith("You did not move: that way is the edge.")
    world.step("<answer>right</answer>")
    fallen = world.step("<answer>down</answer>")
    assert (fallen.reward, fallen.terminated, fallen.info) == (0.0, True, {"invalid": 0, "success": 0})
    assert str(fallen.observation).startswith("You fell into a hole.")
    assert world.expert() is None

    world = on(MAP, moves=6)
    there = world.step("<answer>down, down, right, right, down, right</answer>")
    assert (there.reward, there.terminated, there.info["success"]) == (1.0, True, 1.0)


def test_several_moves_end_with_the_first_that_ends_the_episode() -> None:
    world = on(MAP, moves=4)
    fallen = world.step("<answer>right then down, up, up</answer>")
    assert "'then' is no move" in str(fallen.observation)
    fallen = world.step("<answer>Right, DOWN, up</answer>")
    assert fallen.terminated
    assert world.state() == "1,1"


@pytest.mark.parametrize(
    ("options", "said", "says"),
    [
        ({}, "<answer>jump</answer>", "'jump' is no move"),
        ({}, "<answer>right right</answer>", "these are 2 moves at once"),
        ({}, "right", "there is no <answer>"),
        ({}, "<answer>12</answer>", "'12' is no move"),
        ({"format": "free"}, "hm", "there is no move in what you said"),
        ({"format": "free", "moves": 2}, "left\nup up up", "these are 3 moves"),
    ],
)
def test_what_is_no_move_is_reported_and_costs(options: dict[str, object], said: str, says: str) -> None:
    world = on(MAP, invalid_penalty=0.1, **options)
    step = world.step(said)
    assert says in str(step.observation)
    assert str(step.observation).endswith(world.view())
    assert (step.reward, step.done, step.info) == (-0.1, False, {"invalid": 1, "success": 0, "state": "0,0"})


def test_free_text_is_read_for_moves() -> None:
    world = on(MAP, format="free")
    world.step("Not down, and not left: I go right.")
    assert world.state() == "0,1"
    world = on(MAP, format="free", moves=3)
    world.step("up would be wrong\ndown, down and right\nThat is all.")
    assert world.state() == "2,1"


def test_maps_come_from_the_seed_and_have_as_many_holes_as_they_should() -> None:
    texts = [FrozenLake(size=6, holes=0.3).reset(seed)[0] for seed in range(100)]
    assert texts == [FrozenLake(size=6, holes=0.3).reset(seed)[0] for seed in range(100)]
    assert len(set(texts)) == 100
    grids = [text.rpartition("\n\n")[2] for text in texts]
    assert 0.2 < sum(grid.count("O") for grid in grids) / (100 * 34) < 0.3, "maps that cannot be solved have most holes"
    assert not any("O" in FrozenLake(holes=0.0).reset(seed)[0].rpartition("\n\n")[2] for seed in range(20))


@pytest.mark.parametrize(("size", "holes"), [(2, 0.2), (4, 0.2), (4, 0.4), (8, 0.2), (8, 0.4)])
def test_the_experts_way_is_as_short_as_value_iterations(size: int, holes: float) -> None:
    for seed in range(100):
        world = FrozenLake(size=size, holes=holes)
        steps = played(world, seed)
        assert (steps[-1].terminated, sum(step.reward for step in steps)) == (True, 1.0)
        cell, length, choices = 0, 0, best_choices(FrozenLakeEnv(desc=world._map, is_slippery=False))
        while (row_column := divmod(cell, size)) and world._map[row_column[0]][row_column[1]] != "G":
            down, right = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}[choices[cell]]
            cell, length = cell + down * size + right, length + 1
        assert len(steps) == length
        assert len(played(FrozenLake(size=size, holes=holes, moves=3), seed)) == -(-length // 3)


def test_on_slippery_ice_the_expert_is_far_better_than_the_short_way_and_episodes_repeat() -> None:
    expert, short, repeated = 0.0, 0.0, []
    for seed in range(60):
        steps = played(FrozenLake(slippery=True), seed)
        expert += steps[-1].reward
        repeated.append(steps == played(FrozenLake(slippery=True), seed))
        world, plain = FrozenLake(slippery=True), FrozenLake()
        world.reset(seed)
        plain.reset(seed)
        while not world.over:
            plain._cell = world._cell
            short += world.step(str(plain.expert())).reward
    assert all(repeated)
    assert expert >= 50
    assert expert > short + 15


def test_the_same_cell_is_the_same_state_however_it_was_reached() -> None:
    def after(*moves: str) -> int:
        world = on(["SFF", "FFF", "FFG"])
        return state_of([parse_step(world.step(f"<answer>{move}</answer>")) for move in moves][-1])

    assert after("right", "down") == after("down", "right") == after("up", "right", "down")
    assert after("right") != after("down")


@pytest.mark.parametrize("options", [{"size": 1}, {"holes": 1.0}, {"holes": -0.1}, {"moves": 0}, {"format": "xml"}])
def test_lakes_that_cannot_be_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="write"):
        FrozenLake(**options)  # type: ignore[arg-type]
