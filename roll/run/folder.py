"""A run's folder on disk: where everything the run leaves behind lies.

    runs/run/
      config.yaml    the resolved configuration; a folder without it is not a run
      ledger.log     every sample's every transition
      ledger.sqlite  an index of it, made when somebody asks
      metrics.jsonl  numbers of every step
      trace.json     every stage of every sample, for Perfetto
      logs/          what workers in processes of their own print, a file each
      samples/       texts and rewards, a file a step
      checkpoints/   whole checkpoints only
      tensorboard/   the same numbers as events
      summary.json   what came of it
      curve.png      the reward curve

No run is ever overwritten: a folder in use is resumed, moved aside, or refused. One process writes to it at a time.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, Any

from roll.config.errors import RunError, UserError
from roll.run.files import atomic_write, to_json

_LEFTOVER = re.compile(r"\.lock|\..+\.tmp-\d+")


@dataclass(frozen=True)
class RunFolder:
    """A run's folder. It has a config.yaml, written once when the folder was created."""

    path: Path

    @classmethod
    def create(cls, path: Path, config_yaml: str) -> RunFolder:
        """A new run at `path`, which must not exist or be empty."""
        folder = cls(_absolute(path))
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            if cls.is_run(folder.path):
                raise UserError(
                    f"{path} already holds a run: write --resume to go on with it, --restart to move it aside and "
                    "start over, or run.dir=OTHER to put the new run elsewhere"
                )
            if not _is_empty(folder.path):
                raise UserError(
                    f"{path} is not empty, and what it holds is not a run: write run.dir=OTHER to put the run "
                    "elsewhere, or --restart to move the folder aside"
                )
            atomic_write(folder.config_path, config_yaml)
        except OSError as error:
            raise UserError(f"cannot write to {path} ({error.strerror}): write run.dir=OTHER") from error
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The run that lies at `path`."""
        if not path.exists():
            raise UserError(f"there is no run in {path}: write the folder of a run")
        if not cls.is_run(path):
            raise UserError(f"{path} is not a run's folder (it has no config.yaml): write the folder of a run")
        return cls(_absolute(path))

    @staticmethod
    def is_run(path: Path) -> bool:
        """Whether a run lies at `path`."""
        return (path / "config.yaml").is_file()

    @classmethod
    def move_aside(cls, path: Path) -> Path | None:
        """Rename what lies at `path` to `<name>.1`, `.2` …, the first free one; None where there is nothing to move."""
        path = _absolute(path)
        if not path.exists() or (path.is_dir() and _is_empty(path)):
            return None
        if cls.is_run(path):
            with cls(path).lock():
                return _rename_to_free(path)
        return _rename_to_free(path)

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

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace summary.json."""
        atomic_write(self.summary_path, to_json(summary, indent=True) + "\n")

    def read_summary(self) -> dict[str, Any] | None:
        """What summary.json says; None before there is one."""
        try:
            summary: dict[str, Any] = json.loads(self.summary_path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise RunError(f"{self.summary_path} is damaged: {error}") from error
        return summary

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for writing. A second holder, in any process, is refused; the lock dies with its process."""
        try:
            file = (self.path / ".lock").open("a+")
        except OSError as error:
            raise UserError(f"cannot write to {self.path} ({error.strerror}): write run.dir=OTHER") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(
                    f"{self.path} is being written by another process ({_holder(file)}): wait until it ends, stop it, "
                    "or write run.dir=OTHER"
                ) from error
            except OSError as error:
                raise UserError(
                    f"{self.path} is on a file system without locks ({error.strerror}): write run.dir=OTHER"
                ) from error
            _close_in_children(file)
            file.truncate(0)
            file.write(f"pid {os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))


def _is_empty(path: Path) -> bool:
    """Whether a folder holds nothing but what a crash left of an earlier attempt to create the run."""
    return all(_LEFTOVER.fullmatch(entry.name) for entry in path.iterdir())


def _rename_to_free(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.{number}") for number in count(1))
    return path.rename(next(name for name in names if not os.path.lexists(name)))


def _holder(file: IO[str]) -> str:
    file.seek(0)
    return file.read() or "pid unknown"


def _close_in_children(file: IO[str]) -> None:
    """Keep forked children from holding the lock on after their parent has died."""
    reference = weakref.ref(file)

    def close() -> None:
        inherited = reference()
        if inherited is not None:
            inherited.close()

    os.register_at_fork(after_in_child=close)
