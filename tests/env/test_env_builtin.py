"""The environments that come with ROLL, and tasks that take place in one."""

from __future__ import annotations

from typing import Any

import pytest

from roll.config.errors import UserError
from roll.config.schema import TasksConfig
from roll.data.sources import load_tasks
from roll.data.task import EnvSpec
from roll.env.builtin import EchoTurns, Guess, last_integer
from roll.env.resolve import BUILT_IN, resolve
from roll.env.state_key import state_of
from roll.env.tasks import environment_tasks


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", 42),
        ("I say 3, no, 17.", 17),
        ("x=-5", -5),
        ("-5", -5),
        ("3-5", 5),
        ("a-5", 5),
        ("1,234", 1234),
        ("1,2", 2),
        ("42.05", 42),
        ("007", 7),
        ("none", None),
        ("", None),
        ("٣", None),
        ("9" * 10_000, 10**40),
        ("-" + "9" * 10_000, -(10**40)),
    ],
)
def test_the_last_integer(text: str, number: int | None) -> None:
    assert last_integer(text) == number


def test_bisection_always_finds_the_number_and_is_told_the_truth() -> None:
    for seed in range(200):
        world, low, high = Guess(low=-20, high=107, tries=7), -20, 107
        assert "from -20 to 107" in world.reset(seed)
        for turn in range(7):
            middle = (low + high) // 2
            step = world.step(f"Is it {middle}?")
            if step.terminated:
                break
            assert step.reward == 0
            assert step.observation in (f"Higher. Tries left: {6 - turn}.", f"Lower. Tries left: {6 - turn}.")
            low, high = (middle + 1, high) if "Higher" in str(step.observation) else (low, middle - 1)
        assert (step.reward, step.terminated, step.truncated, step.observation) == (1.0, True, False, "Right.")


def test_guesses_that_leave_the_same_numbers_lead_to_the_same_state() -> None:
    def state_after(*guesses: str) -> int:
        world = Guess(low=1, high=100, tries=7)
        world.reset(0)
        world._number = 40
        return state_of([world.step(guess) for guess in guesses][-1])

    assert state_after("20", "60", "30") == state_after("60", "30", "25") == state_after("30", "70", "60")
    assert state_after("20", "60") != state_after("20", "61")
    assert state_after("20", "60") != state_after("20", "none", "60")


def test_a_guess_without_a_number_costs_a_try_and_the_last_one_ends_it() -> None:
    world = Guess(low=5, high=5, tries=3)
    world.reset(0)
    assert world.step("hm").observation == "There is no whole number in what you said. Tries left: 2."
    assert world.step("4").observation == "Higher. Tries left: 1."
    last = world.step("6")
    assert (last.observation, last.reward, last.terminated) == ("Wrong: it was 5. You have no tries left.", 0.0, True)


def test_seeds_choose_the_number_over_the_whole_range() -> None:
    def number(seed: int) -> int:
        world = Guess(low=1, high=5, tries=9)
        world.reset(seed)
        return next(guess for guess in range(1, 6) if world.step(str(guess)).terminated)

    assert {number(seed) for seed in range(60)} == {1, 2, 3, 4, 5}
    assert [number(seed) for seed in range(20)] == [number(seed) for seed in range(20)]


def test_echoing_every_symbol_is_worth_one_and_each_its_share() -> None:
    world = EchoTurns(turns=4, symbols="ab")
    shown, rewards = [world.reset(7)], []
    for turn in range(4):
        step = world.step(f" {shown[-1]}\n" if turn != 2 else "?")
        shown.append(str(step.observation))
        rewards.append(step.reward)
        assert step.terminated == (turn == 3)
    assert rewards == [0.25, 0.25, 0.0, 0.25]
    assert set(shown[:4]) <= {"a", "b"}
    assert shown[4] == ""
    first = EchoTurns(turns=4, symbols="ab")
    assert {first.reset(seed) for seed in range(20)} == {"a", "b"}
    assert first.reset(7) == shown[0]


@pytest.mark.parametrize("make", [lambda: Guess(low=2, high=1), lambda: Guess(tries=0), lambda: EchoTurns(turns=0)])
def test_games_that_cannot_be_played_are_refused(make: object) -> None:
    with pytest.raises(ValueError, match="leave"):
        make()  # type: ignore[operator]


def test_tasks_of_an_environment_have_seeds_of_their_own_in_each_split() -> None:
    options = {"name": "guess", "count": 5, "held_out": 2, "first_seed": 10, "high": 9}
    tasks = load_tasks(TasksConfig(source="environment", options=options), environment_tasks)
    assert [task.environment for task in tasks.train] == [EnvSpec("guess", seed, {"high": 9}) for seed in range(10, 15)]
    assert [task.environment for task in tasks.held_out] == [EnvSpec("guess", seed, {"high": 9}) for seed in (15, 16)]
    assert [task.id for task in tasks.train[:2]] == ["guess#10", "guess#11"]
    assert {(task.domain, task.messages, task.question) for task in tasks.train} == {("guess", (), "")}
    assert next(iter(environment_tasks("train", "guess", domain="games"))).domain == "games"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "gess"}, "did you mean 'guess'"),
        ({"name": "guess", "hihg": 9}, r"'hihg'; its options are: .*; did you mean 'high'"),
        ({"name": "guess", "count": 0}, "count=0"),
        ({}, "missing a required argument: 'name'"),
    ],
)
def test_tasks_that_cannot_be_played_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        load_tasks(TasksConfig(source="environment", options=options), environment_tasks)


SMALL: dict[str, dict[str, Any]] = {
    "frozen_lake": {"turns": 40},
    "python": {"question": "What is 6 × 7?", "answer": 42, "turns": 3},
    "webshop": {"products": 50},
}


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("well", [True, False], ids=["played well", "played badly"])
def test_every_step_says_whether_the_episode_has_succeeded(name: str, well: bool) -> None:
    """Every one: a run may end an episode after any of them."""
    world = resolve(name)(**SMALL.get(name, {}))
    world.reset(seed=3)
    expert = getattr(world, "expert", lambda: "<answer>42</answer>")
    steps = []
    while not steps or not steps[-1].done:
        steps.append(world.step(expert() if well else "hm"))
    assert [step.info["success"] for step in steps] == [0.0] * (len(steps) - 1) + [float(well)]
