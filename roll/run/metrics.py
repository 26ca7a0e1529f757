"""The metrics of every step: a JSON line in metrics.jsonl, and a copy to the run's trackers.

Every complete line of metrics.jsonl is valid JSON with a `step` and a `time_s` (seconds since the epoch); a number that
is not finite is null. A line half-written by a kill is cut off before anything is added. Lines have checksums
(`roll.run.line_checksums`); a changed line is refused.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from roll.atomic_files import atomic_write, to_json
from roll.config.errors import RunError, UserError
from roll.config.file_modes import inherit_folder_mode
from roll.config.renames import metric
from roll.config.secrets import KNOWN
from roll.run.folder import RunFolder
from roll.run.line_checksums import ChecksumWriter, audit, drop_checksums
from roll.run.trackers import Trackers


class Metrics:
    """Writes the metrics of a run."""

    def __init__(self, folder: RunFolder, trackers: Trackers | None = None) -> None:
        self._folder = folder
        self._path = folder.metrics_path
        self._trackers = trackers
        self._open()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Adds the metrics of a step; they are in the file when this returns."""
        assert not {"step", "time_s"} & values.keys(), "step and time_s are written by log itself"
        numbers = {KNOWN.without(name): v if isinstance(v, int) else float(v) for name, v in values.items()}
        line = to_json({"step": step, "time_s": time.time(), **numbers}).encode()
        try:
            self._sums.add(line)
            self._file.write(line + b"\n")
            self._file.flush()
        except OSError as error:
            raise RunError(f"cannot write to {self._path}: {error.strerror}") from error
        if self._trackers is not None:
            self._trackers.log(step, numbers)

    def truncate_after(self, step: int) -> None:
        """Deletes the steps after `step`; a run resumed from there writes them again."""
        self.close()
        kept = [line for line in _whole_lines(self._path) if (row := parse_row(line)) is not None and row["step"] <= step]
        drop_checksums(self._folder.path, self._path)
        atomic_write(self._path, b"".join(line + b"\n" for line in kept))
        self._open()
        if self._trackers is not None:
            self._trackers.resume_from(step + 1)

    def settle(self) -> None:
        """Syncs all lines to disk and records their number, so that a missing line is noticed later."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._sums.settle()
        except OSError as error:
            raise RunError(f"cannot write to {self._path}: {error.strerror}") from error

    def close(self) -> None:
        """Closes the files."""
        try:
            if not self._file.closed:
                with suppress(RunError):  # the write error was reported when it happened
                    self.settle()
                self._sums.close()
                self._file.close()
        finally:
            if self._trackers is not None:
                self._trackers.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @staticmethod
    def read(path: Path) -> list[dict[str, Any]]:
        """Every line of a metrics.jsonl except a last one still being written. A damaged line is refused."""
        try:
            found = audit(path.parent, path)
        except FileNotFoundError as error:
            raise UserError(f"{path} does not exist: write the folder of a run that has metrics") from error
        found.refuse(path.parent, path)
        rows: list[dict[str, Any]] = []
        for number, line in enumerate(found.lines, start=1):
            row = parse_row(line)
            if row is None:
                raise RunError(
                    f"{path} is damaged on line {number}: `roll repair {path.parent}` moves that line aside and says "
                    "what was lost"
                )
            rows.append(row)
        return rows

    def _open(self) -> None:
        self._path.touch()
        self._sums = ChecksumWriter(self._folder.path, self._path)
        self._file = _open_at_whole_line(self._path)


def parse_row(line: bytes) -> dict[str, Any] | None:
    """The content of a line of metrics.jsonl, under the present names of metrics; None if the line is damaged."""
    try:
        row = json.loads(line)
    except (RecursionError, ValueError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int or row["step"] < 0:
        return None
    numbers = all(value is None or isinstance(value, int | float) for value in row.values())
    return {metric(name): value for name, value in row.items()} if numbers else None


def _whole_lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1]


def _open_at_whole_line(path: Path) -> IO[bytes]:
    file = path.open("ab+")
    inherit_folder_mode(path)
    file.seek(0)
    file.truncate(file.read().rfind(b"\n") + 1)
    file.seek(0, os.SEEK_END)
    return file
