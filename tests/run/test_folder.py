from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from roll.config.errors import RunError, UserError
from roll.run import RunFolder


def test_a_run_is_created_and_opened(tmp_path: Path) -> None:
    created = RunFolder.create(tmp_path / "runs" / "one", "seed: 3\n")
    opened = RunFolder.open(tmp_path / "runs" / "one")
    assert opened == created
    assert opened.config_path.read_text() == "seed: 3\n"


def test_a_relative_path_survives_a_change_of_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.create(Path("run"), "")
    monkeypatch.chdir("/")
    assert folder.config_path.exists()


def test_an_existing_run_is_refused_with_what_to_write(folder: RunFolder) -> None:
    with pytest.raises(UserError) as error:
        RunFolder.create(folder.path, "other: 1\n")
    for word in (str(folder.path), "--resume", "--restart", "run.dir=OTHER"):
        assert word in str(error.value)
    assert folder.config_path.read_text() == "seed: 0\n"


def test_a_folder_of_other_things_is_refused_without_suggesting_resume(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"run\.dir=OTHER") as error:
        RunFolder.create(tmp_path, "")
    assert "--resume" not in str(error.value)


def test_what_a_crash_left_of_creating_does_not_stop_the_next_try(tmp_path: Path) -> None:
    (tmp_path / ".config.yaml.tmp-123").touch()
    (tmp_path / ".lock").touch()
    RunFolder.create(tmp_path, "")


def test_a_path_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match="cannot write"):
            RunFolder.create(path, "")


def test_only_runs_open(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.yaml"):
        RunFolder.open(tmp_path)
    with pytest.raises(UserError, match="there is no run in"):
        RunFolder.open(tmp_path / "absent")


def test_move_aside_takes_the_first_free_number(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert RunFolder.move_aside(path) is None
    (tmp_path / "run.1").mkdir()
    RunFolder.create(path, "first: 1\n")
    assert RunFolder.move_aside(path) == tmp_path / "run.2"
    RunFolder.create(path, "second: 1\n")
    assert RunFolder.move_aside(path) == tmp_path / "run.3"
    assert not path.exists()
    assert RunFolder.open(tmp_path / "run.2").config_path.read_text() == "first: 1\n"


def test_a_run_being_written_is_not_moved(folder: RunFolder) -> None:
    with folder.lock(), pytest.raises(UserError, match="another process"):
        RunFolder.move_aside(folder.path)
    assert RunFolder.move_aside(folder.path) is not None


def test_summary(folder: RunFolder) -> None:
    assert folder.read_summary() is None
    folder.write_summary({"accuracy": 0.5, "kl": float("nan")})
    assert folder.read_summary() == {"accuracy": 0.5, "kl": None}
    folder.summary_path.write_text("{")
    with pytest.raises(RunError, match=r"summary\.json is damaged"):
        folder.read_summary()


def test_the_lock_has_one_holder_and_comes_back(folder: RunFolder) -> None:
    with folder.lock(), pytest.raises(UserError, match=f"{folder.path} is being written.*pid {os.getpid()} on"):
        folder.lock().__enter__()
    with folder.lock():
        pass


HOLDER = """
import os, sys, time
from pathlib import Path
from roll.run import RunFolder
with RunFolder.open(Path(sys.argv[1])).lock():
    if not os.fork():
        print(os.getpid(), flush=True)
    time.sleep(60)
"""


def test_the_lock_dies_with_its_process_even_if_its_children_live_on(folder: RunFolder) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder.path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(UserError, match=f"pid {holder.pid}"):
            folder.lock().__enter__()
        holder.kill()
        holder.wait()
        os.kill(child, 0)
        with folder.lock():
            pass
    finally:
        holder.kill()
        os.kill(child, signal.SIGKILL)
        holder.stdout.close()
