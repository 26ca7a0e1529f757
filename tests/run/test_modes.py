"""A run is readable by its owner alone, or by whom `run.mode` says."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from roll.atomic_files import atomic_write
from roll.config import UserError, load_config
from roll.run import Ledger, Metrics, RunFolder, write_samples
from roll.run.history import History
from roll.run.trace import Trace


def modes(path: Path) -> dict[str, str]:
    """The modes of a folder and of all that is in it, links aside."""
    every = [path, *path.rglob("*")]
    return {str(p.relative_to(path)): f"{stat.S_IMODE(p.lstat().st_mode):04o}" for p in every if not p.is_symlink()}


def fill(folder: RunFolder) -> None:
    Ledger.open(folder.ledger_path).close()
    with Metrics(folder) as metrics:
        metrics.log(1, {"a": 1.0})
    Trace.open(folder).close()
    History(folder).add("began", 0)
    write_samples(folder, 1, [{"sample": "1.1"}])
    folder.write_summary({})
    (folder.path / "deep" / "er").mkdir(parents=True)
    (folder.path / "deep" / "er" / "script.sh").touch(0o755)


@pytest.mark.parametrize(("mode", "file"), [("0700", "0600"), ("0750", "0640"), ("0755", "0644"), ("0770", "0660")])
def test_everything_is_as_readable_as_the_folder(tmp_path: Path, mode: str, file: str) -> None:
    folder = RunFolder.create(tmp_path / "run", "seed: 0\n", mode)
    assert modes(folder.path) == {".": mode, ".lock": file, "config.yaml": file, "format.json": file}
    fill(folder)
    made = modes(folder.path)
    for name in (
        "ledger.log",
        "metrics.jsonl",
        "trace.json",
        "history.jsonl",
        "samples/step-000001.jsonl",
        "summary.json",
    ):
        assert made[name] == file, name
    assert made["samples"] == mode
    folder.set_mode(mode)
    made = modes(folder.path)
    assert made.pop("deep/er/script.sh") == mode
    assert set(made.values()) == {mode, file}


def test_an_older_run_becomes_private(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "seed: 0\n", "0755")
    fill(folder)
    outside = tmp_path / "data.jsonl"
    outside.touch(0o644)
    (folder.path / "link").symlink_to(outside)
    folder.set_mode("0700")
    assert set(modes(folder.path).values()) == {"0700", "0600"}
    assert stat.S_IMODE(outside.stat().st_mode) == 0o644, "what a link names is not the run's"


def test_a_file_is_private_before_anything_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create(tmp_path / "run", "seed: 0\n")
    seen: list[int] = []
    replace = os.replace

    def looking(source: Path, target: Path) -> None:
        seen.append(stat.S_IMODE(os.stat(source).st_mode))
        replace(source, target)

    monkeypatch.setattr(os, "replace", looking)
    atomic_write(folder.config_path, "seed: 1\n")
    assert seen == [0o600]


def test_an_empty_folder_that_is_there_already_becomes_private(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(0o755)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    RunFolder.create(tmp_path / "link", "")
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


@pytest.mark.parametrize("written", ["0750", "750", "'0750'", "0o750"[2:]])
def test_a_mode_is_written_as_for_chmod(written: str) -> None:
    assert int(load_config({}, [f"run.mode={written}"]).run.mode, 8) == 0o750
    assert int(load_config({"run": {"mode": 750}}).run.mode, 8) == 0o750


@pytest.mark.parametrize("written", ["0999", "0600", "u+r", "07000", "-1", "0", "0o700", "true"])
def test_other_modes_are_refused(written: str) -> None:
    with pytest.raises(UserError, match=r"run\.mode is .*"):
        load_config({}, [f"run.mode={written}"])


def test_a_refused_mode_says_what_to_write() -> None:
    with pytest.raises(
        UserError, match=r'run\.mode is "0600", but takes three octal digits of which the first is 7, as in 0750'
    ):
        load_config({}, ["run.mode=0600"])
