"""Reads the JSON files of a model folder: what they say is somebody else's, and may be damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from roll.config.errors import UserError


def read_settings(file: Path) -> dict[str, Any]:
    """The object of JSON in a file; `UserError` where there is none."""
    try:
        found = json.loads(file.read_bytes())
    except OSError as error:
        raise UserError(f"model: {file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"model: {file} is damaged: it is not JSON ({error}). Copy it from the model again") from error
    if not isinstance(found, dict):
        raise UserError(f"model: {file} is damaged: it is not an object of JSON. Copy it from the model again")
    return found
