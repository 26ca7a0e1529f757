"""The samples of each step, as text: one JSON line per sample, one file per step, each file complete or absent. Lines
have checksums (`roll.run.line_checksums`); a changed line is refused."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from roll.atomic_files import atomic_open, to_json_line
from roll.config.errors import RunError, UserError
from roll.config.file_modes import inherit_folder_mode
from roll.run.folder import RunFolder
from roll.run.line_checksums import audit, drop_checksums, line_checksum, write_checksums

CHECKED_BYTES = 256 << 20
"""A resumed run verifies this much of its samples, which takes a second. `roll repair` verifies all of them."""


def write_samples(folder: RunFolder, step: int, rows: Iterable[Mapping[str, Any]], part: int | None = None) -> Path:
    """Writes the rows of a step to `samples/step-000010.jsonl`, replacing the file of a rolled-back attempt at the step.

    Several writers write one part each: `samples/step-000010.part-3.jsonl`.
    """
    folder.samples_dir.mkdir(exist_ok=True)
    inherit_folder_mode(folder.samples_dir)
    path = _path(folder, step, part)
    checksum, sums = line_checksum(folder.path, path), list[int]()
    drop_checksums(folder.path, path)
    with atomic_open(path) as file:
        for row in rows:
            line = to_json_line(row)
            file.write(line)
            sums.append(checksum(memoryview(line)[:-1]))
    write_checksums(folder.path, path, sums)
    return path


def drop_samples_after(folder: RunFolder, step: int) -> None:
    """Deletes the samples of steps after `step`; a run resumed from there writes them again."""
    for path in folder.samples_dir.glob("step-*.jsonl"):
        if _step(path) > step:
            _delete(folder, path)


def drop_samples_before(folder: RunFolder, step: int) -> None:
    """Deletes the samples of steps before `step`."""
    for path in folder.samples_dir.glob("step-*.jsonl"):
        if _step(path) < step:
            _delete(folder, path)


def steps_with_samples(folder: RunFolder) -> list[int]:
    """The steps whose samples can be read."""
    return sorted({_step(file) for file in folder.samples_dir.glob("step-*.jsonl")})


def read_samples(folder: RunFolder, step: int) -> list[dict[str, Any]]:
    """The rows of a step; those stored in parts are sorted by sample."""
    single_file = _path(folder, step)
    parts = sorted(folder.samples_dir.glob(f"{single_file.stem}.part-*.jsonl"))
    if single_file.is_file() or not parts:
        return _rows(folder, step, single_file)
    rows = [row for part in parts for row in _rows(folder, step, part)]
    return sorted(rows, key=lambda row: [int(number) for number in row["sample"].split(".")])


def _rows(folder: RunFolder, step: int, path: Path) -> list[dict[str, Any]]:
    try:
        found = audit(folder.path, path)
    except FileNotFoundError as error:
        steps = steps_with_samples(folder)
        known = f"it has steps {steps[0]} to {steps[-1]}" if steps else "it has none; run.save_samples=true writes them"
        raise UserError(f"{folder.path} has no samples of step {step}: {known}") from error
    found.refuse(folder.path, path)
    rows = [parse_sample(line) for line in (*found.lines, found.torn) if line]
    if None in rows:
        raise RunError(
            f"{path} is damaged on line {rows.index(None) + 1}: `roll repair {folder.path}` moves that line aside"
        )
    return [row for row in rows if row is not None]


def check_samples(folder: RunFolder, last: int, max_bytes: int = CHECKED_BYTES) -> None:
    """Verifies the samples of steps up to `last`, newest first, until `max_bytes` are reached."""
    size = 0
    for path in sorted(folder.samples_dir.glob("step-*.jsonl"), key=_step, reverse=True):
        if _step(path) <= last:
            size += path.stat().st_size
            if size > max_bytes:
                return
            audit(folder.path, path).refuse(folder.path, path)


def _delete(folder: RunFolder, path: Path) -> None:
    drop_checksums(folder.path, path)
    path.unlink(missing_ok=True)


def parse_sample(line: bytes) -> dict[str, Any] | None:
    """The row in a line; None if it is damaged."""
    try:
        row = json.loads(line)
    except (RecursionError, ValueError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("sample", ""), str) else None


def _path(folder: RunFolder, step: int, part: int | None = None) -> Path:
    return folder.samples_dir / (f"step-{step:06d}" + ("" if part is None else f".part-{part}") + ".jsonl")


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-").partition(".")[0])
