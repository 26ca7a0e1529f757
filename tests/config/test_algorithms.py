"""Algorithms in a configuration: recipes are defaults, pieces combine, and nothing is set that nothing reads."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import roll
from roll.config import UserError, dump_config, load_config
from roll.config.algorithm import _READ_IF, RECIPES, AlgorithmConfig
from roll.config.schema_tree import dotted, known_paths, section_in, type_at
from roll.config.section import Section

ROOT = Path(roll.__file__).parent
SOURCES = [path for path in ROOT.rglob("*.py") if not path.is_relative_to(ROOT / "config")]
"""Of the library, without the configuration itself."""
READ_BY_THE_CONFIG = {
    "model.lora.alpha": "others read it as `LoraConfig.scale`, where 0 stands for twice the rank",
    "tasks.domain_weights": "others read it as `Config.mix`, which takes it from domains too",
    "rollout.train_on_truncated": "says that its user knows what top_p and top_k do; without it a check refuses them",
}
"""Settings that nothing outside the configuration reads by their names, and why they are there."""


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_its_settings_and_comes_back_as_it_was_written(name: str, tmp_path: Path) -> None:
    config = load_config({"algorithm": name})
    assert {key: getattr(config.algorithm, key) for key in RECIPES[name]} == dict(RECIPES[name])
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.yaml") == config
    assert load_config({"algorithm": {"name": name, "kl_coef": 0.5}}).algorithm.kl_coef == 0.5


def test_what_is_written_wins_over_the_recipe() -> None:
    algorithm = load_config({"algorithm": {"name": "dapo", "clip_high": 0.5}}, ["algorithm.scale=none"]).algorithm
    assert (algorithm.clip_high, algorithm.scale, algorithm.overlong_buffer_ratio) == (0.5, "none", 0.2)


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ({"name": "dappo"}, "did you mean 'dapo'"),
        ({"loss": "clip"}, "did you mean 'clipped'"),
        ({"name": "ppo", "baseline": "group"}, "write algorithm.baseline=none"),
        ({"name": "raft_pp", "scale": "batch"}, "algorithm.positive_above gives every response"),
        ({"name": "raft_pp", "whiten": True}, "write .* algorithm.whiten=false"),
        ({"turn_weight": 1.0, "baseline": "batch"}, "write algorithm.baseline=group"),
        ({"name": "topr", "correction": "truncated"}, "write algorithm.correction=none"),
        ({"correction": "masked", "correction_low": 3.0}, "above algorithm.correction_cap=2"),
        ({"reward_clip": [1, 0]}, "write the lower bound first"),
        ({"tau_positive": 2.0}, "nothing reads it unless algorithm.loss is sapo"),
        ({"name": "sapo", "clip_low": 0.1}, "nothing reads it unless algorithm.loss is clipped or cispo"),
        ({"per_domain": True}, "nothing reads it unless algorithm.baseline or algorithm.scale is batch or running"),
        ({"kl_target": 0.1}, "nothing reads it unless algorithm.kl_coef is above 0"),
        ({"value_clip": None}, "nothing reads it unless algorithm.credit is gae"),
    ],
)
def test_what_does_not_go_together_is_refused(algorithm: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_config({"algorithm": algorithm})


def test_the_critic_alone_does_not_take_all_steps() -> None:
    ppo = {"algorithm": {"name": "ppo", "critic_warmup_steps": 5}, "rollout": {"filter": "none"}}
    assert load_config(ppo, ["train.steps=6"]).train.steps == 6
    with pytest.raises(UserError, match=r"write algorithm\.critic_warmup_steps=4 or less"):
        load_config(ppo, ["train.steps=5"])


@pytest.mark.parametrize("name", sorted(n for n in RECIPES if AlgorithmConfig(name=n).compares_siblings))
def test_comparing_siblings_takes_two(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} compares samples of one task"):
        load_config({"algorithm": name, "rollout": {"group_size": 1}})


@pytest.mark.parametrize("name", sorted(n for n in RECIPES if not AlgorithmConfig(name=n).compares_siblings))
def test_a_group_of_one_has_no_signal_of_its_own(name: str) -> None:
    alone = {"algorithm": name, "rollout": {"group_size": 1}}
    assert load_config(alone, ["rollout.filter=none"]).rollout.group_size == 1
    if name == "remax":  # which is compared with the greedy answer
        load_config(alone)
    else:
        with pytest.raises(UserError, match="drops groups whose rewards are all equal"):
            load_config(alone)


def test_reading_conditions_are_about_settings() -> None:
    assert set(_READ_IF) <= set(AlgorithmConfig.model_fields)


def test_no_setting_exists_that_nothing_reads() -> None:
    """Every setting's name is read as an attribute outside the configuration, whose own checks make nothing happen."""
    read = {
        node.attr
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    settings = [path for path in known_paths() if not _is_section(path)]
    assert len(settings) > 100
    assert {dotted(path) for path in settings if path[-1] not in read} == set(READ_BY_THE_CONFIG)


def _is_section(path: Any) -> bool:
    section: type[Section] | None = section_in(type_at(path))
    return section is not None
