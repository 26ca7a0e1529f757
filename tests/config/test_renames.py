"""Settings and metrics that have another name now: users are told the present one, old runs are read under it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.config import UserError, dump_config, load_config, renames, schema_tree
from roll.config.yaml_document import parse, write
from roll.run.metrics import Metrics

ROOT = Path(__file__).parents[2]
SECTIONS = {"weights": "weights.bucket_mb", "supervise": "supervise.ping_s"}
"""A setting of each section that has another name as a whole."""
NAMES = [SECTIONS.get(name, name) for name in renames.SETTINGS]


@pytest.mark.parametrize("old", NAMES)
def test_an_old_setting_is_refused_with_the_present_name(old: str, tmp_path: Path) -> None:
    now = renames.setting(old)
    assert now is not None
    assert schema_tree.type_at(tuple(old.split("."))) is schema_tree.UNKNOWN
    assert schema_tree.type_at(tuple(now.split("."))) is not schema_tree.UNKNOWN
    said = f"{old} has another name: write {now}"
    with pytest.raises(UserError) as caught:
        load_config({}, [f"{old}=1"])
    assert said in str(caught.value)
    nested: Any = 1
    for name in reversed(old.split(".")):
        nested = {name: nested}
    (tmp_path / "mine.yaml").write_text(json.dumps(nested))
    with pytest.raises(UserError) as caught:
        load_config(tmp_path / "mine.yaml")
    section = next((each for each in SECTIONS if old.startswith(f"{each}.")), None)
    assert said in str(caught.value) or f"{section} has another name: write" in str(caught.value)


@pytest.mark.parametrize("old", NAMES)
def test_the_config_of_an_old_run_is_read_under_present_names(old: str, tmp_path: Path) -> None:
    now = renames.setting(old)
    assert now is not None
    kept = load_config({}, ["model=tiny"])
    settings = parse(dump_config(kept)).data
    value: Any = settings
    for name in now.split(".")[:-1]:
        value = value[name]
    moved = value.pop(now.split(".")[-1])
    section = settings
    for name in old.split(".")[:-1]:
        section = section.setdefault(name, {})
    section[old.split(".")[-1]] = moved
    (tmp_path / "config.yaml").write_text(write(settings))
    with pytest.raises(UserError, match="has another name"):
        load_config(tmp_path / "config.yaml")  # not a run's: a file of the user
    (tmp_path / "ledger.log").touch()
    read = load_config(tmp_path / "config.yaml")
    assert read.model_copy(update={"run": kept.run, "root": kept.root}) == kept.model_copy(update={"root": kept.root})


@pytest.mark.parametrize(
    ("name", "old", "now"), [(name, old, now) for name, values in renames.VALUES.items() for old, now in values.items()]
)
def test_an_old_value_is_refused_in_a_users_config_and_read_in_an_old_run(
    name: str, old: str, now: str, tmp_path: Path
) -> None:
    config = load_config({}, [f"{name}={now}", "rollout.oversample=1"])
    before = next(each for each, present in renames.SETTINGS.items() if present == name)
    section, key = before.split(".")
    (tmp_path / "ledger.log").touch()
    (tmp_path / "config.yaml").write_text(json.dumps({section: {key: old, "oversample": 1}}))
    read = load_config(tmp_path / "config.yaml")
    assert getattr(read.rollout, name.split(".")[1]) == now == getattr(config.rollout, name.split(".")[1])


@pytest.mark.parametrize("old", [*renames.METRICS, "stage/queued_s_mean"])
def test_an_old_metric_is_read_under_its_present_name(old: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "time_s": 2.0, old: 3.5}) + "\n")
    assert Metrics.read(tmp_path / "metrics.jsonl") == [{"step": 1, "time_s": 2.0, renames.metric(old): 3.5}]


def test_names_that_have_not_changed_stay() -> None:
    assert renames.metric("train/loss") == "train/loss"
    assert renames.setting("train.lr") is None
    settings = {"reward": {"options": {"weights": {"a": 1}}}, "tasks": {"options": {"cut": 3}, "weights": {"b.c": 2}}}
    assert renames.config_of_run(settings) == {
        "reward": {"options": {"weights": {"a": 1}}},
        "tasks": {"options": {"cut": 3}, "domain_weights": {"b.c": 2}},
    }


@pytest.mark.parametrize("old", renames.METRICS)
def test_no_code_or_page_has_an_old_metric(old: str) -> None:
    files = [*(ROOT / "roll").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.py")]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files if file.name != "renames.py")
    assert f'"{old}"' not in text
    assert f"`{old}`" not in text
