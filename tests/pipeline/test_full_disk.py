"""A full disk ends a run with one message, and the run continues when there is room."""

from __future__ import annotations

import errno
import functools
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from small_runs import EXACT, TINY, Remains, start_roll
from test_killed_runs import assert_same_run

from roll.config.errors import RunError
from roll.run.disk import ClosingOnFullDisk, explain, file_of, full_disk, human_bytes

MIB = 2**20
CHECKPOINT_BYTES = 12_003_263


def test_a_full_disk_is_recognised_however_it_is_said() -> None:
    for number, words in ((errno.ENOSPC, "No space left"), (errno.EDQUOT, "quota"), (errno.EFBIG, "File too large")):
        bare = OSError(number, os.strerror(number), "/runs/x")
        assert words in str(full_disk(bare))
        assert file_of(bare) == "/runs/x"
        rust = RuntimeError(f"Error while serializing: I/O error: something (os error {number})")
        assert words in str(full_disk(rust))
        wrapped = RunError("a worker failed")
        wrapped.__cause__ = bare
        assert words in str(full_disk(wrapped))
        assert words in str(full_disk(ExceptionGroup("several", [ValueError(), bare])))
        assert words in str(full_disk(RunError(f"cannot write to /runs/x: {os.strerror(number)}")))
    assert full_disk(OSError(errno.EACCES, "Permission denied")) is None
    assert full_disk(RunError("os error 280")) is None


def test_the_message_has_everything(tmp_path: Path) -> None:
    said = str(explain(tmp_path, "metrics.jsonl", "No space left on device", 20))
    for part in (str(tmp_path), "metrics.jsonl", "No space left on device", " free", "step 20 is whole", "resume=True"):
        assert part in said
    assert "from the beginning with resume=True" in str(explain(tmp_path, "x", "No space left on device", None))
    assert [human_bytes(n) for n in (12, 2048, 3 * MIB, 5 << 30)] == ["12 bytes", "2.0 KiB", "3.0 MiB", "5.0 GiB"]


def test_closing_says_nothing_new() -> None:
    class Writer:
        def close(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(RunError, match="first"), ClosingOnFullDisk(Writer()):
        raise RunError("the first message")
    with pytest.raises(OSError, match="No space"), ClosingOnFullDisk(Writer()):
        pass


@dataclass(frozen=True)
class Ended:
    """A run that has ended: its exit status and what it said."""

    status: int
    said: str
    errors: str


def roll(folder: Path, *arguments: str, limit_bytes: int | None = None) -> Ended:
    """Trains in a process whose files may be that large; `folder` gets what it says."""
    limits = (resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    before = None if limit_bytes is None else functools.partial(resource.setrlimit, *limits)
    errors = folder / "errors"
    errors.unlink(missing_ok=True)
    child = start_roll(["train", TINY, *arguments, "--plain"], folder / "said", errors=errors, before=before)
    return Ended(child.end(), child.said, errors.read_text())


def assert_one_message(done: Ended, words: str, *more: str) -> None:
    assert done.status == 1, done.errors
    assert done.errors.startswith("the run failed: "), done.errors
    assert done.errors.count("\n") == 1, done.errors
    assert "Traceback" not in done.said
    for part in (words, " free", "--resume", *more):
        assert part in done.errors


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("limit_bytes", "file"),
    [(9_000, "trace.json"), (6 * MIB, "checkpoints/step-000002")],
    ids=["a log", "the optimizer"],
)
def test_a_limit_on_files_is_one_message(tmp_path: Path, limit_bytes: int, file: str) -> None:
    every = "run.checkpoint_every=" + ("2" if "checkpoints" in file else "0")
    done = roll(tmp_path, *EXACT, f"run={tmp_path / 'run'}", "run.tensorboard=true", every, limit_bytes=limit_bytes)
    assert_one_message(done, "File too large", file)
    assert not list((tmp_path / "run").rglob("*tmp-*"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for two and a half checkpoints of the tiny model."""
    path = tmp_path / "disk"
    path.mkdir()
    size = int(2.5 * CHECKPOINT_BYTES)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a file system here: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("filled", [0, pytest.param(20 * MIB, marks=pytest.mark.thorough)])
def test_a_full_disk_leaves_the_last_checkpoint_and_the_run_continues(
    small_disk: Path, tmp_path: Path, undisturbed: Remains, filled: int
) -> None:
    """Two checkpoints fit, the third does not; with something else there, not even the first."""
    (small_disk / "others").write_bytes(bytes(filled))
    run = small_disk / "run"
    settings = (*EXACT, f"run={run}")
    done = roll(tmp_path, *settings)
    saved = {0: 4, 20 * MIB: 0}[filled]
    where = f"the checkpoint of step {saved} is whole" if saved else "there is no checkpoint yet"
    assert_one_message(done, "No space left on device", f"checkpoints/step-{saved + 2:06d}", where)
    assert not list(run.rglob("*tmp-*"))
    if saved:
        assert Remains(run).checkpoint.step == saved

    subprocess.run(["mount", "-o", f"remount,size={10 * CHECKPOINT_BYTES}", str(small_disk)], check=True)
    child = start_roll(["train", TINY, *settings, "--resume"], small_disk / "out")
    assert child.end() == 0, child.said
    assert_same_run(Remains(run), undisturbed)


@pytest.mark.slow
def test_a_disk_that_fills_up_bit_by_bit_is_one_message(small_disk: Path, tmp_path: Path) -> None:
    """Wherever the last bytes happen to go."""
    run = small_disk / "run"
    for free in (0, 20_000, 45_000):
        shutil.rmtree(run, ignore_errors=True)
        usage = os.statvfs(small_disk)
        (small_disk / "others").write_bytes(bytes(max(0, usage.f_bavail * usage.f_frsize - free)))
        done = roll(tmp_path, *EXACT, f"run={run}", "run.tensorboard=true")
        (small_disk / "others").unlink()
        if done.status == 2:  # not even a folder could be made
            assert done.errors.count("\n") == 1
            assert "No space left on device" in done.errors
        else:
            assert_one_message(done, "No space left on device")
