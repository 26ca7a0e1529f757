"""Parts from outside the package: the examples of docs/guides/extending.md run as files and as an installed package."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from small_runs import start_roll

from roll.config import UserError, load_config
from roll.pipeline.preflight import find
from roll.run import Metrics

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "extending.md"

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="not a source tree")

SETTINGS = ["threads=1", "devices=cpu", "run.tensorboard=false", "run.curve=false"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def written(folder: Path) -> str:
    """The page's configuration, in a file of the folder."""
    (folder / "run.yaml").write_text(blocks("yaml")[0])
    return "run.yaml"


def check_run(run: Path) -> None:
    """Every part of the user's has left its mark."""
    rows = [row for row in Metrics.read(run / "metrics.jsonl") if "reward/mean" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["train/longest_sample"] > 4 for row in rows), "the trainer is the user's"
    assert not any("time/step_s" in row for row in rows), "the loop is the user's, which logs no such thing"
    assert all(row["train/rollout_logprob_diff"] < 1e-4 for row in rows), "the engine's log-probs are the trainer's"
    lines = [json.loads(line) for line in (run / "lines.jsonl").read_text().splitlines()]
    assert [line["reward/mean"] for line in lines if "reward/mean" in line] == [row["reward/mean"] for row in rows]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 3
    assert list((run / "checkpoints").iterdir())


def test_the_examples_of_the_page_run_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "parts.py").write_text("\n".join(blocks("python")))
    monkeypatch.chdir(tmp_path)
    child = start_roll(["train", written(tmp_path), *SETTINGS, "run.dir=run"], tmp_path / "out")
    assert child.end() == 0, child.said
    run = tmp_path / "run"
    check_run(run)
    kept = json.loads((run / "code" / "manifest.json").read_text())
    assert "parts.py" in json.dumps(kept), "a run keeps the code of its parts"


@pytest.mark.thorough
def test_the_examples_of_the_page_run_from_an_installed_package(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "my_package").mkdir(parents=True)
    (site / "my_package" / "__init__.py").write_text("")
    (site / "my_package" / "parts.py").write_text("\n".join(blocks("python")))
    names = {
        "roll.trackers": "lines = my_package.parts:Lines",
        "roll.infer_strategies": "plain = my_package.parts:PlainBackend",
        "roll.train_strategies": "watched = my_package.parts:WatchedBackend",
        "roll.pipelines": "short = my_package.parts:ShortLoop",
    }
    offered = site / "my_package-1.0.dist-info"
    offered.mkdir()
    (offered / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (offered / "entry_points.txt").write_text("\n".join(f"[{group}]\n{line}\n" for group, line in names.items()))
    roles = "roles={actor_train: {strategy: watched}, actor_infer: {strategy: plain}}"
    overrides = (*SETTINGS, "run.dir=run", "pipeline=short", roles, "run.trackers=[lines]")
    command = [sys.executable, "-m", "roll.cli", "train", written(tmp_path), *overrides]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), str(site)])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    check_run(tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"pipeline": "rlvf"}, "pipeline 'rlvf' is not known: write .*rlvr.*did you mean 'rlvr'"),
        ({"pipeline": "parts.py:Lines"}, "is no pipeline: write a subclass of roll.pipeline.base.Pipeline"),
        ({"pipeline": "parts.py:Half"}, "the class Half has no evaluate: write the method"),
        (
            {"roles": {"actor_train": {"strategy": "singel"}}},
            "roles.actor_train.strategy 'singel' .*'single'",
        ),
        ({"run": {"trackers": ["parts.py:Nothing"]}}, "run.trackers 'parts.py:Nothing': .*has no 'Nothing'"),
        ({"reward": "numbr"}, "reward 'numbr' is not known: .*did you mean 'number'"),
        ({"rollout": {"task_order": "in_ordre"}}, "rollout.task_order 'in_ordre' is not known: .*'in_order'"),
    ],
)
def test_a_part_that_is_none_is_refused_by_name(
    settings: dict[str, object], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = "\nfrom roll.pipeline.base import Pipeline\nclass Half(Pipeline): ...\n"
    (tmp_path / "parts.py").write_text(blocks("python")[0] + half)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    settings_of_all = yaml.safe_load("{model: tiny, tasks: echo, reward: number}") | settings
    with pytest.raises(UserError, match=says):
        find(load_config(settings_of_all))
