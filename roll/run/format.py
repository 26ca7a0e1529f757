"""The format of run folders and checkpoints: a number that increases when the names stored in them change.

    format.json                        {"format": 1, "roll": "0.1.0"}, written when the run is created
    checkpoints/step-…/manifest.json   the same two entries

Invariant: ROLL never writes into a folder whose format it does not know. A folder without a number has format 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll.atomic_files import atomic_write, to_json
from roll.config.errors import RunError, UserError
from roll.config.version import __version__

FORMAT = 2
"""The format that this version of ROLL writes. It reads every format up to this one."""
FORMAT_FILE = "format.json"


def format_entries() -> dict[str, Any]:
    """The format and the version that writes it, for a JSON object of a run."""
    return {"format": FORMAT, "roll": __version__}


def write_format(run: Path) -> None:
    """Records in a run's folder that this version writes it."""
    atomic_write(run / FORMAT_FILE, to_json(format_entries(), indent=True) + "\n")


def check_format(run: Path) -> int:
    """The format of a run's folder; raises `UserError` if a newer version has written it."""
    file = run / FORMAT_FILE
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        return 1
    except (RecursionError, ValueError) as error:
        raise RunError(f"{file} is damaged ({error}): `roll repair {run}` moves it aside") from error
    if not isinstance(found, dict):
        raise RunError(f"{file} is damaged (it is not a JSON object): `roll repair {run}` moves it aside")
    return format_number(run, found)


def format_number(path: Path, entries: Mapping[str, Any]) -> int:
    """The format in a folder's entries; raises `UserError` if this version cannot read it."""
    number = entries.get("format", 1)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise UserError(f"{path} has format {number!r}, which is no format of ROLL")
    if number > FORMAT:
        raise UserError(
            f"{path} has format {number}, written by ROLL {entries.get('roll', 'of a newer version')}; this is ROLL "
            f"{__version__}, which reads formats up to {FORMAT}: install the version that wrote it, or a newer one"
        )
    return number
