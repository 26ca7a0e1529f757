"""Runs of older formats continue. `format_1.tar.xz` has two projects, trained for three steps each before settings,
metrics and stored names were renamed: `rlvr` (a reward in a file, settings far from their defaults) and `sft` (an
adapter)."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from roll.cli import main
from roll.run import Checkpoints, Ledger, Metrics, RunFolder
from roll.run.format import FORMAT, check_format

ARCHIVES = sorted(Path(__file__).parent.glob("format_*.tar.xz"))


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name.removesuffix(".tar.xz"))
def projects(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.mark.parametrize("name", ["rlvr", "sft"])
def test_an_old_run_continues_where_it_ended(projects: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(projects / name)
    before = Metrics.read(projects / name / "run" / "metrics.jsonl")
    assert main(["train", "run/config.yaml", "--resume", "train.steps=5", "--plain"]) == 0
    folder = RunFolder.open(projects / name / "run")
    rows = Metrics.read(folder.metrics_path)
    assert rows[: len(before)] == before
    assert sorted({int(row["step"]) for row in rows if row["step"]}) == [1, 2, 3, 4, 5]
    assert check_format(folder.path) == FORMAT
    checkpoint = Checkpoints(folder).latest()
    assert checkpoint is not None
    assert checkpoint.step == 5
    checkpoint.verify()
    if name == "rlvr":
        states = [last.state for last in Ledger.lineage(folder.ledger_path).values()]
        assert states.count("trained") == 5 * 2 * 4


@pytest.mark.parametrize("command", [["eval"], ["ledger"], ["repair", "--dry-run"], ["export"]])
def test_commands_read_an_old_run(
    projects: Path, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(projects / "rlvr")
    more = ["out"] if command == ["export"] else []
    status = main([*command, "run", *more])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert "Traceback" not in printed.out + printed.err


def test_the_summary_of_an_old_run_has_its_result(projects: Path) -> None:
    summary = RunFolder.open(projects / "rlvr" / "run").read_summary()
    assert summary is not None
    assert json.loads((projects / "rlvr" / "run" / "summary.json").read_text())["steps"] == summary["steps"] == 3
