"""The results under docs/results: their configs and commands resolve, and no task is both trained and measured on."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from roll.config.load import load_config
from roll.config.schema import Config
from roll.data.task import EnvSpec
from roll.env.base import parse_reset
from roll.env.resolve import resolve
from roll.pipeline.preflight import find

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
CONFIGS = sorted(path.stem for path in RESULTS.glob("*.yaml"))
PAGE = (RESULTS / "index.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^ *(?:for .*?; do )?(roll train .*?)(?:; done)?$", PAGE.replace("\\\n", " "), re.MULTILINE)
VARIABLES = {"seed": "1", "kind": "dense"}
FEWER = {"count": 20, "held_out": 5}
"""Tasks of a source that can be asked for fewer."""


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(RESULTS))
    yield __import__("worlds")._specs
    sys.modules.pop("worlds")


def config(name: str) -> Config:
    return load_config(str(RESULTS / f"{name}.yaml"), ["model=tiny"])


def world(spec: EnvSpec) -> str:
    """The map without the instructions before it."""
    said = parse_reset(resolve(spec.name)(**spec.options).reset(seed=spec.seed)).messages[-1]["content"]
    return said.rpartition("\n\n")[2]


def worlds(specs: Any, options: dict[str, Any], split: str, most: int) -> set[str]:
    own = {key: value for key, value in options.items() if key not in ("name", "count", "held_out", "first_seed")}
    made = specs(split, options["name"], most, 256, options.get("first_seed", 0), own)
    return {world(spec) for spec in made}


def test_no_lake_is_both_trained_and_measured_on(specs: Any) -> None:
    options = config("frozen_lake").tasks.options
    measured = worlds(specs, options, "held_out", 0)
    assert len(measured) > 100
    assert not measured & worlds(specs, options, "train", 2000)


def test_no_room_is_both_shown_or_trained_and_measured_on(specs: Any) -> None:
    options, shown = config("sokoban").tasks.options, config("sokoban_demonstrations").data.options
    measured = worlds(specs, options, "held_out", 0)
    assert len(measured) > 200
    assert not measured & worlds(specs, options, "train", 2000)
    assert not measured & worlds(specs, shown, "train", 2000)


def overrides_of(command: str) -> tuple[str, list[str]]:
    """The config and the overrides of a `roll train` command whose shell variables have values."""
    for name, value in VARIABLES.items():
        command = command.replace(f"${name}", value)
    path, *overrides = shlex.split(command)[2:]
    return path, overrides


def resolve_all(config: Config) -> None:
    """Finds what the config names: tasks, conversations, rewards, environments, algorithm."""
    for section in ("tasks", "data"):
        source = getattr(config, section)
        fewer = {key: value for key, value in FEWER.items() if key in source.options}
        changed = source.model_copy(update={"options": {**source.options, **fewer}})
        config = config.model_copy(update={section: changed})
    assert find(config)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_loads_and_what_it_names_is_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    resolve_all(config(name))


def test_a_models_run_is_one_that_another_config_makes() -> None:
    loaded = [load_config(str(RESULTS / f"{name}.yaml")) for name in CONFIGS]
    made = {each.run.dir for each in loaded}
    models = {each.model.path for each in loaded if each.model.path.startswith("runs/")}
    assert models - made == {"runs/results/models/mixture"}, "router_replay.py writes it"


def test_the_page_has_a_command_for_every_config() -> None:
    named = {Path(overrides_of(command)[0]) for command in COMMANDS}
    assert {path.stem for path in named if path.parent.name == "results"} == set(CONFIGS)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: Path(command.split()[2]).stem)
def test_a_command_of_the_page_can_be_pasted(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    path, overrides = overrides_of(command)
    load_config(path, overrides)
    if any(":" in override for override in overrides):
        resolve_all(load_config(path, [*overrides, "model=tiny"]))


def test_the_page_names_files_that_are_there() -> None:
    files = re.findall(r"docs/results/[\w.]+\.\w+", PAGE)
    files += [f"docs/results/{name}" for name in re.findall(r"\]\((\w+\.\w+)\)", PAGE)]
    assert files
    assert [name for name in files if not (ROOT / name).exists()] == []
