"""What the results under docs/results are measured on was never trained on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from roll.config.load import load_config
from roll.config.schema import Config
from roll.data.task import EnvSpec
from roll.env.base import parse_reset
from roll.env.resolve import resolve

RESULTS = Path(__file__).parent.parent / "docs" / "results"


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
