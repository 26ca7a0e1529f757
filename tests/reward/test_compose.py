"""Rewards made of rewards: the arithmetic of weights and gates, and what is refused before a run starts."""

from __future__ import annotations

import asyncio
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.config import Config, changed_keys, dump_config, load_config
from roll.config.errors import UserError
from roll.config.schema import RewardConfig
from roll.data import Response, Task
from roll.reward import RewardSpec, ScoreFailure, Verdict, compose
from roll.reward.base import PartFailure, is_deterministic, normalise
from roll.reward.compose import Composed, WeightedPart
from roll.reward.pool import GraderPool

TASK, RESPONSE = Task.ask("t", "?", 5), Response("5", 1, "stop")

values = st.floats(-100, 100)
parts = st.builds(
    WeightedPart,
    st.just("number"),
    weight=values,
    gate=st.booleans(),
    gate_at=st.none() | values,
    gate_value=values,
)
rules = st.dictionaries(st.sampled_from("abcdef"), st.tuples(parts, values), min_size=1)


def judged(rule: dict[str, tuple[WeightedPart, float]]) -> Verdict:
    rewards: Any = {name: (lambda task, response, value=value: value) for name, (_, value) in rule.items()}
    return normalise(Composed({name: part for name, (part, _) in rule.items()}, rewards)(TASK, RESPONSE))


@given(rules)
def test_every_part_stands_beside_the_reward_gates_open_or_closed(rule: dict[str, tuple[WeightedPart, float]]) -> None:
    assert judged(rule).parts == {name: value for name, (_, value) in rule.items()}


@given(rules)
def test_the_reward_is_the_lowest_closed_gates_value_or_the_weighted_sum(
    rule: dict[str, tuple[WeightedPart, float]],
) -> None:
    closed = []
    for part, value in rule.values():
        is_closed = value <= 0 if part.gate_at is None else value < part.gate_at
        if part.gate and is_closed:
            closed.append(part.gate_value)
    expected = min(closed) if closed else math.fsum(part.weight * value for part, value in rule.values())
    assert judged(rule).reward == expected


@given(rules, st.randoms())
def test_the_order_of_the_parts_does_not_matter(rule: dict[str, tuple[WeightedPart, float]], order: Any) -> None:
    names = list(rule)
    order.shuffle(names)
    assert judged({name: rule[name] for name in names}).reward == judged(rule).reward


@given(rules, values)
def test_a_part_of_no_weight_that_is_no_gate_is_a_metric_only(
    rule: dict[str, tuple[WeightedPart, float]], value: float
) -> None:
    more = {**rule, "g": (WeightedPart("number", weight=0), value)}
    assert judged(more).reward == judged(rule).reward


@given(st.dictionaries(st.sampled_from("abc"), values, min_size=1))
def test_parts_of_weight_one_are_a_plain_sum(rule: dict[str, float]) -> None:
    assert judged({name: (WeightedPart("number"), value) for name, value in rule.items()}).reward == math.fsum(
        rule.values()
    )


def test_parts_of_parts_keep_their_names() -> None:
    rewards: Any = {"a": lambda *_: {"reward": 2, "x": 3, "y": 4}, "b": lambda *_: {"x": 1, "z": 2}}
    got = normalise(Composed({"a": WeightedPart(""), "b": WeightedPart("", weight=10)}, rewards)(TASK, RESPONSE))
    assert got == Verdict(32, {"a": 2, "a/x": 3, "a/y": 4, "b": 3, "b/x": 1, "b/z": 2})


def test_a_composed_reward_is_deterministic_if_all_its_parts_say_so() -> None:
    def steady(task: Task, response: Response) -> float:
        return 1.0

    steady.deterministic = True  # type: ignore[attr-defined]

    def moody(task: Task, response: Response) -> float:
        return 1.0

    def both(*rewards: Any) -> bool:
        named = {str(i): reward for i, reward in enumerate(rewards)}
        return is_deterministic(Composed(dict.fromkeys(named, WeightedPart("")), named), TASK)

    assert both(steady, steady)
    assert not both(steady, moody)
    assert not is_deterministic(moody, TASK)


CONFIG = {
    "reward": {
        "parts": {
            "right": "number",
            "near": {"name": "number", "weight": 0.5, "options": {"tolerance": 2}},
        }
    }
}


def test_the_parts_of_a_configuration_are_composed() -> None:
    config = load_config(CONFIG)
    reward = compose(config.reward)
    assert normalise(reward(TASK, Response("5", 1, "stop"))) == Verdict(1.5, {"right": 1, "near": 1})
    assert normalise(reward(TASK, Response("6", 1, "stop"))) == Verdict(0.5, {"right": 0, "near": 1})
    assert config.reward.label == "right + near"


@pytest.mark.parametrize(
    "source", [CONFIG, {"reward": "math"}, {"reward": {"name": "number", "options": {"tolerance": 1}}}]
)
def test_a_configuration_of_rewards_is_written_and_read_back(source: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(load_config(source)))
    assert changed_keys(load_config(file), load_config(source)) == []
    loaded = pickle.loads(pickle.dumps(RewardSpec.of_config(load_config(file).reward)))
    loaded.check()


def refusal(reward: Any, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        RewardSpec.of_config(load_config({"reward": reward}, list(overrides)).reward).check()
    return str(caught.value)


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ("nubmer", "reward 'nubmer' is not known: write "),
        ("nubmer", "did you mean 'number'"),
        ({"parts": {"right": "maht"}}, "reward.parts.right 'maht' is not known"),
        (
            {"parts": {"right": {"name": "number", "wieght": 2}}},
            "wieght is not a setting; did you mean reward.parts.r",
        ),
        ({"parts": {"right": {"name": "number", "zzzzz": 2}}}, "reward.parts.right has: name, options, weight"),
        ({"parts": {"right": {"weight": 2}}}, "reward.parts.right.name must be set"),
        (
            {"name": "number", "options": {"tolerence": 1}},
            "reward.options.tolerence is not an option of 'number'; did",
        ),
        ({"name": "number", "options": {"zzz": 1}}, "is not an option of 'number'; it takes: tolerance, relative"),
        ({"name": "number", "options": {"tolerance": "a"}}, 'reward.options.tolerance is "a", but takes a number'),
        ({"name": "number", "options": {"tolerance": -1}}, "reward.options: tolerance is -1, but takes a number ≥ 0"),
        (
            {"parts": {"r": {"name": "math", "options": {"boxed": 1}}}},
            "reward.parts.r.options.boxed is 1, but takes `true`",
        ),
        ({"name": "math", "parts": {"right": "math"}}, "reward.name is 'math' and reward.parts is set"),
        ({"parts": {"reward": "math"}}, "reward.parts has a part named 'reward'"),
        ({"parts": {"a/b": "math"}}, "reward.parts has a part named 'a/b'"),
        ({"parts": {"a": {"name": "math", "gate_at": 1}}}, "reward.parts.a.gate_at is set, but the part is no gate"),
        ({"parts": {"a": {"name": "math", "weight": math.inf}}}, "reward.parts.a.weight is Infinity"),
        ({"parts": ["math"]}, "reward.parts is ["),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_write(reward: Any, says: str) -> None:
    assert says in refusal(reward)


@pytest.mark.parametrize("name", ["judge", "http"])
def test_a_token_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model = {"model": "m"} if name == "judge" else {}
    part = {"name": name, "options": {"url": "http://localhost:1/v1", "token_env": "MY_TOKEN", **model}}
    assert "reward.options.token_env is 'MY_TOKEN', but no such environment variable is set: `export" in refusal(part)
    assert "reward.parts.sound.options.token_env is" in refusal({"parts": {"sound": part}})
    monkeypatch.setenv("MY_TOKEN", "secret")
    RewardSpec.of_config(load_config({"reward": part}).reward).check()


def test_a_short_override_does_not_silently_lose_to_parts() -> None:
    assert "each is the whole reward" in refusal(CONFIG["reward"], "reward=number")


def test_users_functions_take_options_and_users_classes_are_made_with_them(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def score(task, response, *, bonus=1, malus=0): return bonus - malus\n"
        "def steady(task, response, bonus=1): return bonus\n"
        "steady.deterministic = True\n"
        "class Held:\n    def __call__(self, task, response, bonus=1): return bonus\n"
        "held = Held()\n"
        "class Counts:\n"
        "    deterministic = True\n"
        "    def __init__(self, letter): self.letter = letter\n"
        "    def __call__(self, task, response): return response.text.count(self.letter)\n"
        "class EnvSpecError:\n    def __call__(self, task): return 1\n"
    )

    def made(name: str, **options: Any) -> Any:
        return compose(RewardConfig(name=f"{file}:{name}", options=options))

    assert made("score")(TASK, RESPONSE) == 1
    assert made("score", bonus=3)(TASK, RESPONSE) == 3
    assert is_deterministic(made("steady", bonus=3), TASK)
    assert made("held", bonus=2)(TASK, RESPONSE) == 2
    assert made("Counts", letter="5")(TASK, RESPONSE) == 1
    assert is_deterministic(made("Counts", letter="5"), TASK)
    assert not is_deterministic(made("score", bonus=3), TASK)
    with pytest.raises(UserError, match=r"reward.options.bouns is not an option of .*; did you mean 'bonus'"):
        made("score", bouns=3)
    with pytest.raises(UserError, match="missing a required argument: 'letter'"):
        made("Counts")
    with pytest.raises(UserError, match="called as"):
        made("EnvSpecError")


def test_a_part_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def raises(task, response): raise KeyError('book')\ndef nothing(task, response): pass\n"
    )

    async def failure(name: str) -> ScoreFailure:
        config = RewardConfig.model_validate({"parts": {"right": "number", "mine": f"{tmp_path}/mine.py:{name}"}})
        async with GraderPool(RewardSpec.of_config(config)) as pool:
            with pytest.raises(ScoreFailure) as caught:
                await pool.score(TASK, RESPONSE)
            return caught.value

    raised, invalid = asyncio.run(failure("raises")), asyncio.run(failure("nothing"))
    assert (raised.kind, invalid.kind) == ("raised", "invalid")
    assert raised.reason.startswith("part 'mine': KeyError: 'book' (mine.py:1)")
    assert "in raises" in raised.detail
    assert invalid.reason.startswith("part 'mine': the reward function returned None")


def test_the_default_is_still_the_last_number() -> None:
    assert compose(Config().reward)(TASK, RESPONSE) == 1.0
    with pytest.raises(PartFailure):
        compose(RewardConfig.model_validate({"parts": {"a": "number"}}))(Task.ask("t", "?", "many"), RESPONSE)
