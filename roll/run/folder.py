"""A run's folder on disk: all files that the run writes.

    runs/run/
      config.yaml    the resolved configuration; a folder without it is not a run
      ledger.log     every transition of every sample
      ledger.sqlite  an index of it, built when it is first queried
      metrics.jsonl  metrics per step
      trace.json     a span per state of each sample, for Perfetto
      history.jsonl  start, checkpoints, resumes, repairs and changed settings
      logs/          output of worker processes, one file per worker
      samples/       texts and rewards, one file per step
      sums/          checksums of the lines in metrics and samples
      checkpoints/   complete checkpoints only
      tensorboard/   the same metrics as TensorBoard events
      summary.json   the run's results
      curve.png      the reward curve

Invariants:

- No run is ever overwritten: its folder is resumed, moved aside, or refused. One process writes to it at a time.
- Only a run is ever moved aside, and only files that a run wrote are ever deleted. A folder is a run if it has a
  config.yaml and also the ledger, or the lock file under which the run was created.
- A run is never in the working directory, the home folder, a repository's root, or a folder that contains one of these.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, Any

from roll.atomic_files import atomic_write, to_json
from roll.config.errors import RunError, UserError
from roll.config.file_modes import inherit_folder_mode, inherit_folder_mode_recursively
from roll.config.hints import option
from roll.run.format import FORMAT_FILE, check_format, write_format

_LEFTOVER = re.compile(r"\.lock|\..+\.tmp-\d+")
_LOCK_OWNER = re.compile(r"pid \d+ on \S")
_RUN_FILES = (
    "metrics.jsonl",
    "history.jsonl",
    "ledger.*",
    "trace*.json",
    "summary.json",
    "curve.png",
    "graders.log*",
    "environments.log*",
    ".*.tmp-*",
    FORMAT_FILE,
    "config.yaml",
)
_RUN_FOLDERS = ("code", "logs", "samples", "sums", "checkpoints", "tensorboard")


@dataclass(frozen=True)
class RunFolder:
    """A run's folder. It has a config.yaml, written when the folder is created and again when settings change."""

    path: Path

    @classmethod
    def check_new(cls, path: Path, restart: bool = False) -> None:
        """Refuses a path where no new run can be created, or only with `restart`."""
        check_location(path)
        if path.is_dir() and restart:
            cls._refuse_if_no_run(path)
        elif path.is_dir():
            cls._refuse_occupied(path)

    @classmethod
    def create(cls, path: Path, config_yaml: str, mode: str = "0700") -> RunFolder:
        """Creates a run at `path`, which must not exist or be empty; `mode` is the folder's permission mode."""
        check_location(path)
        folder = cls(_absolute(path))
        try:
            # Not `folder.path`: if it is a link to a folder that does not exist yet, that folder is created.
            Path(os.path.realpath(path)).mkdir(parents=True, exist_ok=True)
            cls._refuse_occupied(path)
            folder.set_mode(mode)
            with folder.lock():
                cls._refuse_occupied(path)  # another process may have created a run there in between
                atomic_write(folder.config_path, config_yaml)
                write_format(folder.path)
        except OSError as error:
            raise UserError(f"cannot write to {path} ({error.strerror}): write run.dir=OTHER") from error
        return folder

    @classmethod
    def _refuse_occupied(cls, path: Path) -> None:
        if cls.is_run(path):
            raise UserError(
                f"{path} already holds a run: write {option('resume')} to continue it, {option('restart')} to move it "
                "aside and start over, or run.dir=OTHER to put the new run elsewhere"
            )
        if not _is_empty(path):
            raise UserError(
                f"{path} is not empty, and what it holds is not a run ({_first_entries(path)}): write run.dir=OTHER to "
                "put the run elsewhere"
            )

    @classmethod
    def _refuse_if_no_run(cls, path: Path) -> None:
        if not cls.is_run(path) and not _is_empty(path):
            raise UserError(
                f"{path} is not a run's folder ({_why_no_run(path)}), and {option('restart')} moves only runs aside: "
                "move it yourself, or write run.dir=OTHER"
            )

    @classmethod
    def open(cls, path: str | Path, any_format: bool = False) -> RunFolder:
        """The run at `path`; refused if its format is one that this version cannot read."""
        path = Path(path)
        if not path.exists():
            raise UserError(f"there is no run in {path}: write the folder of a run")
        if not cls.is_run(path):
            raise UserError(f"{path} is not a run's folder ({_why_no_run(path)}): write the folder of a run")
        if not any_format:
            check_format(path)
        return cls(_absolute(path))

    @staticmethod
    def is_run(path: Path) -> bool:
        """Whether the folder at `path` is a run. A config.yaml alone is not enough: other programs have one too."""
        if not (path / "config.yaml").is_file():
            return False
        return (path / "ledger.log").is_file() or _was_locked(path)

    @classmethod
    def move_aside(cls, path: Path) -> Path | None:
        """Renames the run at `path` to the first free name of `<name>.1`, `.2` …; returns None if there is nothing to
        move.

        If `path` is a link, its target is renamed, so the new run is on the same disk.
        """
        check_location(path)
        real = Path(os.path.realpath(path))
        if not real.exists() or _is_empty(real):
            return None
        cls._refuse_if_no_run(path)
        with cls(real).lock():
            return _rename_to_free(real)

    @classmethod
    def move_back(cls, aside: Path, path: Path) -> None:
        """Undoes `move_aside`, unless the path is in use again."""
        real = Path(os.path.realpath(path))
        if not real.exists() or (real.is_dir() and not any(real.iterdir())):
            aside.rename(real)

    def discard(self, first_created: Path | None) -> None:
        """Deletes the files of a run that never began; the caller holds the lock. Nothing else is deleted.

        Then deletes the folders from the run's own up to `first_created`, the topmost one that the run created, as long
        as they are empty.
        """
        for name in _RUN_FOLDERS:
            shutil.rmtree(self.path / name, ignore_errors=True)
        for pattern in (*_RUN_FILES, ".lock"):  # the config last but one: until then the folder counts as a run
            for file in self.path.glob(pattern):
                file.unlink(missing_ok=True)
        real = Path(os.path.realpath(self.path))
        while first_created is not None and real.is_relative_to(first_created):
            try:
                real.rmdir()
            except OSError:
                return
            real = real.parent

    def set_mode(self, mode: str) -> None:
        """Sets the folder's permission mode and gives its contents the same; a folder of another user is left as it
        is."""
        with suppress(PermissionError):
            os.chmod(os.path.realpath(self.path), int(mode, 8))
        for inside in self.path.iterdir():
            inherit_folder_mode_recursively(inside)

    def delete_leftovers(self) -> None:
        """Deletes temporary files that a killed process never renamed; the caller holds the lock."""
        for folder in (self.path, self.samples_dir, self.path / "sums", self.path / "sums" / "samples"):
            for file in folder.glob(".*.tmp-*"):
                if _LEFTOVER.fullmatch(file.name) and file.is_file():
                    file.unlink(missing_ok=True)

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    @property
    def ledger_path(self) -> Path:
        return self.path / "ledger.log"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def history_path(self) -> Path:
        return self.path / "history.jsonl"

    @property
    def samples_dir(self) -> Path:
        return self.path / "samples"

    @property
    def checkpoints_dir(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard_dir(self) -> Path:
        return self.path / "tensorboard"

    @property
    def summary_path(self) -> Path:
        return self.path / "summary.json"

    @property
    def curve_path(self) -> Path:
        return self.path / "curve.png"

    def write_format(self) -> None:
        """Records that from now on this version writes the run."""
        write_format(self.path)

    def write_config(self, config_yaml: str) -> None:
        """Replace config.yaml."""
        atomic_write(self.config_path, config_yaml)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace summary.json."""
        atomic_write(self.summary_path, to_json(summary, indent=True) + "\n")

    def read_summary(self) -> dict[str, Any] | None:
        """The content of summary.json; None if it does not exist yet."""
        try:
            summary = json.loads(self.summary_path.read_bytes())
            if not isinstance(summary, dict):
                raise ValueError("it is not a JSON object")
            return summary
        except FileNotFoundError:
            return None
        except (RecursionError, ValueError) as error:
            raise RunError(
                f"{self.summary_path} is damaged ({error}): `roll repair {self.path}` moves it aside"
            ) from error

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Locks the run for writing. A second lock, in any process, is refused; the lock ends with its process."""
        try:
            file = (self.path / ".lock").open("a+")
            inherit_folder_mode(self.path / ".lock")
        except OSError as error:
            raise UserError(f"cannot write to {self.path} ({error.strerror}): write run.dir=OTHER") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(
                    f"{self.path} is being written by another process ({_lock_owner(file)}): wait until it ends, stop "
                    "it, or write run.dir=OTHER"
                ) from error
            except OSError as error:
                raise UserError(
                    f"{self.path} is on a file system without locks ({error.strerror}): write run.dir=OTHER"
                ) from error
            _close_in_children(file)
            try:
                file.truncate(0)
                file.write(f"pid {os.getpid()} on {socket.gethostname()}")
                file.flush()
            except OSError as error:
                raise UserError(
                    f"cannot write to {self.path} ({error.strerror}): make room, or write run.dir=OTHER"
                ) from error
            yield


def check_location(path: Path) -> None:
    """Refuses a path that cannot be a run's folder, whatever it holds; follows links."""
    real = Path(os.path.realpath(path))
    instead = "write run.dir=OTHER, a folder of the run's own such as runs/NAME"
    if real.exists() and not real.is_dir():
        raise UserError(f"cannot write to {path} (it is a file): {instead}")
    for what, protected in _protected_folders():
        if real == protected:
            raise UserError(f"run.dir is {path}, which is {what}: {instead}")
        if protected.is_relative_to(real):
            raise UserError(f"run.dir is {path}, which contains {what} ({protected}): {instead}")
    if (real / ".git").exists():
        raise UserError(f"run.dir is {path}, which is the root of a git repository: {instead}")
    if ".git" in real.parts:
        raise UserError(f"run.dir is {path}, which is inside a git repository's own files: {instead}")


def first_missing_folder(path: Path) -> Path | None:
    """The topmost folder on the path that does not exist yet; None if all exist."""
    real = Path(os.path.realpath(path))
    return next((folder for folder in (*reversed(real.parents), real) if not folder.exists()), None)


def _protected_folders() -> Iterator[tuple[str, Path]]:
    """Folders that cannot be a run's, with a description of each."""
    yield "the root of the file system", Path("/")
    with suppress(FileNotFoundError):  # it was deleted
        yield "the working directory", Path.cwd().resolve()
    with suppress(RuntimeError):  # the user has no home folder
        yield "the home folder", Path.home().resolve()


def _was_locked(path: Path) -> bool:
    try:
        return _LOCK_OWNER.match((path / ".lock").read_text(errors="replace")) is not None
    except OSError:
        return False


def _why_no_run(path: Path) -> str:
    if (path / "config.yaml").is_file():
        return "it has a config.yaml, but neither a ledger.log nor the lock of a run"
    return "it has no config.yaml"


def _first_entries(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir() if not _LEFTOVER.fullmatch(entry.name))
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))


def _is_empty(path: Path) -> bool:
    """Whether a folder holds nothing but leftovers of a crashed attempt to create the run."""
    return all(_LEFTOVER.fullmatch(entry.name) for entry in path.iterdir())


def _rename_to_free(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.{number}") for number in count(1))
    try:
        return path.rename(next(name for name in names if not os.path.lexists(name)))
    except OSError as error:
        raise UserError(f"{path} cannot be moved aside ({error.strerror}): write run.dir=OTHER") from error


def _lock_owner(file: IO[str]) -> str:
    file.seek(0)
    return file.read() or "pid unknown"


def _close_in_children(file: IO[str]) -> None:
    """Closes the lock file in forked children; they would otherwise hold the lock after their parent died."""
    reference = weakref.ref(file)

    def close() -> None:
        inherited = reference()
        if inherited is not None:
            inherited.close()

    os.register_at_fork(after_in_child=close)
