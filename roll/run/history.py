"""The history of a run: one JSON line per event, append-only.

    {"time_s": 1794737230.2, "event": "began", "step": 0}
    {"time_s": 1794737305.7, "event": "saved", "step": 20}
    {"time_s": 1794740011.3, "event": "resumed", "step": 20}
    {"time_s": 1794740011.3, "event": "changed", "step": 20, "key": "train.lr", "before": 1e-06, "after": 5e-07}

Events are `began`, `saved` (a checkpoint), `resumed`, `changed` (a setting, on resume) and `repaired`.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from roll.atomic_files import sync_folder, to_json
from roll.config.errors import RunError
from roll.config.file_modes import inherit_folder_mode
from roll.run.folder import RunFolder


class History:
    def __init__(self, folder: RunFolder) -> None:
        self.path = folder.history_path

    def add(self, event: str, step: int, **details: Any) -> None:
        """Adds an event; it is on disk when this returns."""
        line = to_json({"time_s": time.time(), "event": event, "step": step, **details}).encode() + b"\n"
        new = not self.path.exists()
        try:
            with self.path.open("ab+") as file:
                inherit_folder_mode(self.path)
                size = file.seek(0, os.SEEK_END)
                if size and _last_byte(self.path) != b"\n":
                    line = b"\n" + line  # a line half-written by a kill becomes a line of its own, which readers skip
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(f"cannot write to {self.path}: {error.strerror}") from error
        if new:
            sync_folder(self.path.parent)

    def read(self) -> list[dict[str, Any]]:
        """Every event that can be parsed."""
        return [event for event in map(parse_event, self._lines()) if event is not None]

    def newest_saved(self) -> int | None:
        """The step of the newest checkpoint in the history."""
        return max((event["step"] for event in self.read() if event["event"] == "saved"), default=None)

    def _lines(self) -> list[bytes]:
        try:
            return self.path.read_bytes().splitlines()
        except FileNotFoundError:
            return []


def parse_event(line: bytes) -> dict[str, Any] | None:
    """The event in a line; None if it has none."""
    try:
        event = json.loads(line)
    except (RecursionError, ValueError):
        return None
    good = isinstance(event, dict) and isinstance(event.get("event"), str) and type(event.get("step")) is int
    return event if good else None


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)
