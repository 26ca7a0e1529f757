"""The samples of each step, as text: one JSON line a sample, one file a step, each file whole or absent."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from roll.config.errors import RunError, UserError
from roll.run.files import atomic_open, to_json
from roll.run.folder import RunFolder


def write_samples(folder: RunFolder, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write the rows of a step to `samples/step-000010.jsonl`, replacing what an undone attempt at it left."""
    folder.samples_dir.mkdir(exist_ok=True)
    path = _path(folder, step)
    with atomic_open(path) as file:
        for row in rows:
            file.write(to_json(row).encode() + b"\n")
    return path


def read_samples(folder: RunFolder, step: int) -> list[dict[str, Any]]:
    """The rows of a step."""
    path = _path(folder, step)
    try:
        return [json.loads(line) for line in path.read_bytes().splitlines()]
    except FileNotFoundError as error:
        steps = sorted(int(file.stem.removeprefix("step-")) for file in folder.samples_dir.glob("step-*.jsonl"))
        known = f"it has steps {steps[0]} to {steps[-1]}" if steps else "it has none; run.save_samples=true writes them"
        raise UserError(f"{folder.path} has no samples of step {step}: {known}") from error
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}") from error


def _path(folder: RunFolder, step: int) -> Path:
    return folder.samples_dir / f"step-{step:06d}.jsonl"
