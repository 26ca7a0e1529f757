from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from roll.config.errors import RunError, UserError
from roll.run import RunFolder
from roll.run.folder import first_missing_folder


def test_a_run_is_created_and_opened(tmp_path: Path) -> None:
    created = RunFolder.create(tmp_path / "runs" / "one", "seed: 3\n")
    opened = RunFolder.open(str(tmp_path / "runs" / "one"))
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
    for word in (str(folder.path), "resume=True", "restart=True", "run.dir=OTHER"):
        assert word in str(error.value)
    assert folder.config_path.read_text() == "seed: 0\n"


def test_a_folder_of_other_things_is_refused_without_suggesting_resume(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"run\.dir=OTHER") as error:
        RunFolder.create(tmp_path, "")
    assert "resume=True" not in str(error.value)


def test_what_a_crash_left_of_creating_does_not_stop_the_next_try(tmp_path: Path) -> None:
    (tmp_path / ".config.yaml.tmp-123").touch()
    (tmp_path / ".lock").touch()
    RunFolder.create(tmp_path, "")


def test_a_path_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match="cannot write"):
            RunFolder.create(path, "")
    with pytest.raises(UserError, match="it is a file"):
        RunFolder.move_aside(tmp_path / "file")


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


def listing(path: Path) -> list[str]:
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Somebody's home, with a project that has the working directory inside it."""
    home = tmp_path / "home"
    (home / "project" / "src").mkdir(parents=True)
    (home / "project" / ".git").mkdir()
    (home / "project" / "config.yaml").write_text("seed: 1\n")
    (home / "thesis").mkdir()
    (home / "thesis" / "thesis.tex").write_text("years of work")
    (home / "empty").mkdir()
    (home / "link").symlink_to(home / "project")
    (home / "link-to-cwd").symlink_to(home / "project" / "src")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "project" / "src")
    return home


@pytest.mark.parametrize(
    ("place", "what"),
    [
        (".", "the working directory"),
        ("..", "contains the working directory"),
        ("../../link-to-cwd", "the working directory"),
        ("../../project", "contains the working directory"),
        ("~", "contains the working directory"),
        ("/", "the root of the file system"),
        ("../../link", "contains the working directory"),
        ("../.git", "inside a git repository"),
        ("../.git/runs/x", "inside a git repository"),
    ],
)
def test_a_place_that_is_no_runs_is_refused_and_left_alone(home: Path, place: str, what: str) -> None:
    before, path = listing(home), home if place == "~" else Path(place)
    for refuse in (lambda: RunFolder.create(path, ""), lambda: RunFolder.move_aside(path)):
        with pytest.raises(UserError, match=rf"{what}.*write run\.dir=OTHER"):
            refuse()
    assert listing(home) == before


def test_the_home_folder_and_a_repository_elsewhere_are_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    for path, what in ((home, "the home folder"), (home.parent, "contains the home folder"), (home / "link", "git")):
        for refuse in (lambda path=path: RunFolder.create(path, ""), lambda path=path: RunFolder.move_aside(path)):
            with pytest.raises(UserError, match=what):
                refuse()


def test_only_runs_are_moved_aside(home: Path) -> None:
    before = listing(home)
    with pytest.raises(UserError, match=r"thesis is not a run's folder \(it has no config\.yaml\).*run\.dir=OTHER"):
        RunFolder.move_aside(home / "thesis")
    assert RunFolder.move_aside(home / "empty") is None
    assert listing(home) == before
    # A project with a config.yaml of its own, and whatever lock, is no run.
    shutil.rmtree(home / "project" / ".git")
    os.chdir("/")
    for lock in (None, "", "12345\n"):
        if lock is not None:
            (home / "project" / ".lock").write_text(lock)
        assert not RunFolder.is_run(home / "project")
        with pytest.raises(UserError, match=r"neither a ledger\.log nor the lock of a run"):
            RunFolder.move_aside(home / "project")


def test_a_link_keeps_runs_on_the_disk_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk" / "run")
    RunFolder.create(tmp_path / "run", "first: 1\n")
    assert RunFolder.move_aside(tmp_path / "run") == tmp_path / "disk" / "run.1"
    RunFolder.create(tmp_path / "run", "second: 1\n")
    assert (tmp_path / "disk" / "run" / "config.yaml").read_text() == "second: 1\n"


def test_what_a_run_that_never_began_wrote_is_deleted_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for place in (tmp_path / "mine", tmp_path / "a" / "b" / "run"):
        made = first_missing_folder(place)
        folder = RunFolder.create(place, "seed: 0\n")
        with folder.lock():
            (folder.path / "ledger.log").touch()
            (folder.path / "logs").mkdir()
            (folder.path / "logs" / "actor.log").touch()
            folder.discard(made)
    assert listing(tmp_path) == ["mine"]  # it was there before, and the others were not

    (tmp_path / "kept").mkdir()
    made = first_missing_folder(tmp_path / "kept" / "run")
    folder = RunFolder.create(tmp_path / "kept" / "run", "seed: 0\n")
    (folder.path / "notes.txt").write_text("put here meanwhile")
    with folder.lock():
        folder.discard(made)
    assert listing(tmp_path / "kept") == ["run", "run/notes.txt"]


def test_a_run_that_never_began_gives_its_name_back(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", "old: 1\n")
    aside = RunFolder.move_aside(tmp_path / "run")
    assert aside is not None
    made = first_missing_folder(tmp_path / "run")
    new = RunFolder.create(tmp_path / "run", "new: 1\n")
    with new.lock():
        new.discard(made)
        RunFolder.move_back(aside, tmp_path / "run")
    assert RunFolder.open(tmp_path / "run").config_path.read_text() == "old: 1\n"
    assert listing(tmp_path) == ["run", "run/.lock", "run/config.yaml", "run/format.json"]


def test_a_run_being_written_is_not_moved(folder: RunFolder) -> None:
    with folder.lock(), pytest.raises(UserError, match="another process"):
        RunFolder.move_aside(folder.path)
    assert RunFolder.move_aside(folder.path) is not None


def test_summary(folder: RunFolder) -> None:
    assert folder.read_summary() is None
    folder.write_summary({"accuracy": 0.5, "kl": float("nan")})
    assert folder.read_summary() == {"accuracy": 0.5, "kl": None}
    for damaged in ("{", "[1]", "[" * 100_000):
        folder.summary_path.write_text(damaged)
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
from roll.run.folder import first_missing_folder
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


def test_files_that_a_killed_process_never_renamed_are_deleted(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", "seed: 1\n")
    (run.path / "sums" / "samples").mkdir(parents=True)
    run.samples_dir.mkdir()
    left = [".summary.json.tmp-7", "samples/.step-000001.jsonl.tmp-7", "sums/.metrics.jsonl.crc.tmp-7"]
    left += ["sums/samples/.step-000001.jsonl.crc.tmp-18875"]
    kept = ["samples/step-000001.jsonl", "sums/samples/step-000001.jsonl.crc", ".mine", "samples/.mine.tmp-x"]
    for name in left + kept:
        (run.path / name).touch()
    (run.path / ".export.tmp-9").mkdir()  # `roll export` is writing it
    run.delete_leftovers()
    assert not [name for name in left if (run.path / name).exists()]
    assert all((run.path / name).exists() for name in [*kept, ".export.tmp-9", "config.yaml"])
