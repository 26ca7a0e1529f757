"""Environments of other libraries: gymnasium's own and one's own, and those of GEM's kind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from roll.config.errors import UserError
from roll.data.task import EnvSpec
from roll.env import check, resolve
from roll.env.base import parse_reset, parse_step
from roll.env.compat import plain_info, plain_text
from roll.env.gem import GemEnvironment
from roll.env.gymnasium_text import GymnasiumText, observation_text
from roll.env.pool import EnvPool


class Scales(gymnasium.Env[Any, Any]):
    """Add weights, drawn by chance, until the pointer is where it was asked to be."""

    observation_space = spaces.Dict({"pointer": spaces.Box(-9, 9, (2,)), "left": spaces.Discrete(9)})

    def __init__(self, action_space: spaces.Space[Any]) -> None:
        self.action_space = action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.took: list[Any] = []
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.took.append(action)
        info = {"drawn": self.np_random.random(), "array": np.ones(3), "text": "hm", "none": None, "nan": float("nan")}
        return self._seen(), np.float32(0.5), False, len(self.took) == 3, info  # type: ignore[return-value]

    def _seen(self) -> dict[str, Any]:
        return {"pointer": np.array([0.5, -1.25]), "left": 3 - len(self.took)}


def scales(space: spaces.Space[Any], **options: Any) -> tuple[GymnasiumText, Scales]:
    inner = Scales(space)
    world = GymnasiumText(inner, **options)
    world.reset(0)
    return world, inner


def test_a_gymnasium_environment_by_name_is_drawn_as_text_and_played_to_its_end() -> None:
    name, options = (
        "gymnasium:FrozenLake-v1",
        {"make": {"is_slippery": False}, "actions": ["left", "down", "right", "up"]},
    )
    check(EnvSpec(name, 0, options))
    world = resolve(name)(**options)
    text, _ = world.reset(seed=1)
    assert text == (
        "Each turn, say one of left, down, right, up, like this: <answer>left</answer>\n\n[S]FFF\nFHFH\nFFFH\nHFFG"
    )
    steps = [world.step(f"<answer>{move}</answer>") for move in ("Down", "down", "right", "right", "down", "right")]
    assert steps[-1].observation.endswith("SFFF\nFHFH\nFFFH\nHFF[G]")
    assert (steps[-1].reward, steps[-1].terminated, steps[0].terminated) == (1.0, True, False)
    wrong = world.step("<answer>fly</answer>")
    assert "'fly' is none of left, down, right, up." in wrong.observation
    assert wrong.info["invalid"] == 1


def test_the_seed_makes_the_episode_also_in_a_process() -> None:
    async def main() -> list[list[str]]:
        spec = EnvSpec("gymnasium:CartPole-v1", 5)
        async with EnvPool(workers=2) as pool:
            said = []
            for name in "ab":
                begun = await pool.reset(name, spec)
                steps = [await pool.step(name, f"<answer>{n % 2}</answer>") for n in range(5)]
                said.append([begun.messages[0]["content"], *(str(step.observation) for step in steps)])
        return said

    one, other = asyncio.run(main())
    assert one == other
    world = resolve("gymnasium:CartPole-v1")()
    assert parse_reset(world.reset(5)).messages[0]["content"] == one[0]
    assert one[0] != world.reset(6)[0]


@pytest.mark.parametrize(
    ("space", "said", "action"),
    [
        (spaces.Discrete(3), "2", 2),
        (spaces.Discrete(3, start=5), "I take 7.", 7),
        (spaces.Discrete(3), "3", None),
        (spaces.Discrete(3), "1 2", None),
        (spaces.Discrete(3), "1.5", None),
        (spaces.Discrete(3), "-1", None),
        (spaces.Discrete(3), "9" * 400, None),
        (spaces.MultiDiscrete([2, 4]), "1, 3", [1, 3]),
        (spaces.MultiDiscrete([2, 4]), "3, 1", None),
        (spaces.Box(-1, 1, (2, 1)), "0.5 -.25", [[0.5], [-0.25]]),
        (spaces.Box(-1, 1, (2, 1)), "0.5 2", None),
        (spaces.Box(-1, 1, (2, 1)), "0.5 1e999", None),
        (spaces.Text(9), " Anything ", "Anything"),
        (spaces.Text(9), "Any thing", None),
    ],
)
def test_actions_are_read_by_what_the_environment_takes(space: spaces.Space[Any], said: str, action: Any) -> None:
    world, inner = scales(space)
    step = world.step(f"<answer>{said}</answer>")
    if action is None:
        assert inner.took == []
        assert "Invalid action" in str(step.observation)
    else:
        (took,) = inner.took
        assert (took.tolist() if hasattr(took, "tolist") else took) == action
        assert space.contains(took)


def test_observations_rewards_and_info_of_any_kind_can_be_taken() -> None:
    world, _ = scales(spaces.Discrete(2), intro="Weigh.", turns=9)
    begun = parse_reset(world.reset(3))
    assert begun.messages[0]["content"] == (
        "Weigh.\n\nEach turn, say a number from 0 to 1, like this: <answer>0</answer>\n\npointer: 0.5 -1.25\nleft: 3"
    )
    step = parse_step(world.step("<answer>1</answer>"))
    assert (step.observation, step.reward, step.truncated) == ("pointer: 0.5 -1.25\nleft: 2", 0.5, False)
    assert set(step.info) == {"invalid", "drawn", "text"}
    world.step("<answer>1</answer>")
    assert world.step("<answer>1</answer>").truncated
    world.reset(3)
    assert world.step("<answer>1</answer>").info["drawn"] == step.info["drawn"]
    assert observation_text([np.zeros((2, 2)), 7]) == "0 0\n0 0\n7"


def shown(observation: Any, world: Any) -> str:
    return f"{observation['left']} left, {len(world.took)} taken"


def chosen(text: str, world: Any) -> int:
    if text not in ("heavy", "light"):
        raise ValueError(f"there is no {text} weight.")
    return ["light", "heavy"].index(text)


@pytest.mark.parametrize("by", ["function", "name"])
def test_how_it_is_shown_and_read_may_be_the_users(by: str) -> None:
    functions: dict[str, Any] = {"show": shown, "read": chosen}
    names = {key: f"{__file__}:{function.__name__}" for key, function in functions.items()}
    world, inner = scales(spaces.Discrete(2), **(functions if by == "function" else names))
    assert world.reset(0)[0] == "3 left, 0 taken"
    assert world.step("<answer>heavy</answer>").observation == "2 left, 1 taken"
    assert inner.took == [1]
    assert world.step("<answer>odd</answer>").observation == "Invalid action: there is no odd weight.\n\n2 left, 1 taken"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: GymnasiumText(Scales(spaces.Discrete(3)), actions=["a"]), "names 1 actions"),
        (lambda: GymnasiumText(Scales(spaces.Dict({})), format="free"), "write read=FUNCTION"),
    ],
)
def test_what_cannot_be_played_is_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("gymnasium:FrozenLak-v1", {}, "FrozenLake"),
        ("gymnasium:Nothing", {}, "gymnasium:Nothing"),
        ("gymnasium:CartPole-v1", {"turn": 3}, "did you mean 'turns'"),
        ("gem:game:GuessTheNumber-v0", {}, "pip install gem-llm"),
    ],
)
def test_names_and_options_that_cannot_be_are_refused_before_a_run(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        check(EnvSpec(name, 0, options))


def test_a_function_that_makes_one_is_an_environment_by_its_name() -> None:
    world = resolve(f"{__file__}:weigh")()
    assert "left: 3" in world.reset(seed=0)[0]


def weigh() -> GymnasiumText:
    return GymnasiumText(lambda: Scales(spaces.Discrete(2)))


def test_what_stands_out_by_its_colour_stands_in_brackets() -> None:
    assert plain_text("\n\x1b[41mS\x1b[0mFF\n\x1b[2K") == "[S]FF"
    assert plain_info({"a": np.float32(1), "b": [1], 3: True, "c": float("inf"), "d": np.zeros(1)}) == {
        "a": 1.0,
        "3": 1.0,
    }


class Dice:
    """In the manner of GEM: text by itself, noise from the global generators."""

    def __init__(self, turns: int = 3) -> None:
        self.left = turns

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        random.seed(seed)
        np.random.seed(seed)
        return f"Rolled {random.random()}.", {"suffix": "Roll again?", "history": []}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return f"{action} {random.random()} {np.random.rand()}", 0.25, self.left == 0, False, {"left": self.left}


class Unseeded(Dice):
    def reset(self) -> tuple[str, dict[str, Any]]:  # type: ignore[override]
        return "", {}


def test_an_environment_of_gems_kind_is_played() -> None:
    world = GemEnvironment(Dice, {"turns": 2})
    begun = parse_reset(world.reset(seed=4))
    assert begun.messages[0]["content"].endswith(".\nRoll again?")
    assert begun.info == {"suffix": "Roll again?"}
    steps = [parse_step(world.step("yes")) for _ in range(2)]
    assert [(step.reward, step.terminated, step.info) for step in steps] == [
        (0.25, False, {"left": 1}),
        (0.25, True, {"left": 0}),
    ]
    world.close()
    with pytest.raises(UserError, match=r"Unseeded\.reset takes no seed"):
        GemEnvironment(Unseeded())


def test_its_episodes_come_from_their_seeds_alone_whatever_the_neighbours_draw() -> None:
    def alone(seed: int) -> list[str]:
        world = GemEnvironment(Dice())
        return [world.reset(seed)[0], *(str(world.step("go").observation) for _ in range(3))]

    worlds = [GemEnvironment(Dice()) for _ in range(3)]
    together = [[world.reset(seed)[0]] for seed, world in enumerate(worlds)]
    random.seed(99)
    expected = random.Random(99).random()
    for _ in range(3):
        for said, world in zip(together, worlds, strict=True):
            said.append(str(world.step("go").observation))
            np.random.rand()
    assert random.random() == expected, "who else draws is left alone"
    assert together == [alone(seed) for seed in range(3)]
