"""What is found out of an environment before a run starts: the values of its options, and how many episodes it has."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from roll.config import load_config
from roll.config.errors import UserError
from roll.config.schema import TasksConfig
from roll.data.sources import load_tasks
from roll.data.task import EnvSpec, Task
from roll.env import check, register
from roll.env.builtin import Guess
from roll.env.preflight import episodes
from roll.env.webshop import env as webshop_env
from roll.pipeline.prepare import prepare

names = importlib.import_module("roll.env.resolve")
"""Where names are registered: the package has a function of the same name."""


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("frozen_lake", {"holes": 1.0}, "holes=1.0: write .* holes from 0 to below 1"),
        ("frozen_lake", {"format": "xml"}, 'format is "xml", but takes `answer`, `json` or `free`'),
        ("frozen_lake", {"size": "4"}, 'size is "4", but takes a whole number'),
        ("frozen_lake", {"slippery": "no"}, 'slippery is "no", but takes `true` or `false`'),
        ("frozen_lake", {"turns": -1}, "turns is -1: write 0 for no limit"),
        ("sokoban", {"boxes": 0}, "boxes=0 in a level of height=6, width=6, walls included: write 1 or more"),
        ("sokoban", {"min_pushes": 5, "max_pushes": 3}, "min_pushes=5, max_pushes=3: write"),
        ("webshop", {"data": "/nope"}, "data is '/nope', which is no folder"),
        ("webshop", {"view": "ful"}, "view is .*did you mean `full`"),
        ("maths_retries", {"problems": "/nope.jsonl"}, "problems: there is no file '/nope.jsonl'"),
        ("python", {"kinds": ["foo"]}, r'kinds is \["foo"\], but takes a list of `arithmetic`'),
        ("python", {"kinds": "sum"}, 'kinds is "sum", but takes a list'),
        ("guess", {"tries": 0}, "leaves nothing to guess"),
        ("echo_turns", {"symbols": 12}, "symbols is 12, but takes text"),
        ("gymnasium:Taxi-v4", {"format": "xml"}, 'format is "xml", but takes'),
        ("gymnasium:Taxi-v4", {"actions": ["up"]}, "actions names 1 actions"),
        ("gymnasium:Taxi-v4", {"make": {"rain": 3}}, "making one raised TypeError: .*'rain'"),
        ("gymnasium:Taxi-v4", {"read": "nope.py:read"}, "read 'nope.py:read': there is no file"),
    ],
)
def test_a_value_that_cannot_work_is_refused_in_a_line(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=f"^environment '{name}': .*{says}") as refused:
        load_tasks(TasksConfig(source="environment", options={"name": name, **options}))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["frozen_lake", "sokoban", "maths_retries", "python", "guess", "gymnasium:Taxi-v4"])
def test_of_most_environments_every_seed_makes_an_episode(name: str) -> None:
    assert episodes(EnvSpec(name)) is None
    check(EnvSpec(name, 10**9))


def test_a_shop_has_as_many_episodes_as_goals_and_is_not_built_to_count_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webshop_env, "generate", None)
    options = {"products": 100}
    check(EnvSpec("webshop", 399, options))
    with pytest.raises(UserError, match="environment 'webshop': the seed is 400, but its episodes are 0 to 399"):
        check(EnvSpec("webshop", 400, options))
    with pytest.raises(UserError, match=r"^tasks\.options: 'webshop' has 400 episodes .* with count=400, held_out=1"):
        load_tasks(TasksConfig(source="environment", options={"name": "webshop", "count": 400, "held_out": 1, **options}))


def test_another_ones_environment_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(names, "_REGISTRY", dict(names._REGISTRY))

    @register("costly_world")
    class Costly(Guess):
        def __init__(self, size: int = 1) -> None:
            made.append(size)

    check(EnvSpec("costly_world", 0, {"size": "big"}))
    with pytest.raises(UserError, match="'sise'; its options are: size; did you mean 'size'"):
        check(EnvSpec("costly_world", 0, {"sise": 3}))
    assert made == []


def test_every_task_of_a_source_is_looked_at(tmp_path: Path) -> None:
    """Not only the first with such options: their values, and seeds, may differ."""

    def prepared(*specs: EnvSpec) -> None:
        config = load_config({"model": "tiny", "run": str(tmp_path / "run")})
        prepare(config, tasks=lambda split: [Task(f"{n}", (), environment=spec) for n, spec in enumerate(specs)])

    prepared(EnvSpec("frozen_lake", 1, {"size": 3}), EnvSpec("webshop", 7, {"products": 2}))
    with pytest.raises(UserError, match=r"size=1, .* write a size of 2 or more"):
        prepared(EnvSpec("frozen_lake", 1, {"size": 3}), EnvSpec("frozen_lake", 1, {"size": 1}))
    with pytest.raises(UserError, match="the seed is 8, but its episodes are 0 to 7"):
        prepared(EnvSpec("webshop", 7, {"products": 2}), EnvSpec("webshop", 8, {"products": 2}))
