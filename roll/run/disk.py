"""Full disks: recognised in any error, and reported once.

Writers fail in different ways: Python raises an `OSError`, safetensors and tokenizers raise errors of their own, a worker
in another process sends its error as text. All of them quote the operating system.
"""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from roll.config.errors import RunError
from roll.config.hints import option

_NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MESSAGES = ("No space left on device", "Disk quota exceeded", "File too large")
_QUOTED = re.compile("|".join([*_MESSAGES, *(rf"\bos error {number}\b" for number in _NUMBERS)]))
_FILE = re.compile(r"cannot write to (\S+): |'(/[^']+)'")


class DiskFull(RunError):
    """Nothing more can be written to the run's disk."""


def full_disk(error: BaseException) -> str | None:
    """The operating system's message, if the error was caused by a full disk, a quota or a file size limit."""
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.errno in _NUMBERS:
            return _MESSAGES[_NUMBERS.index(cause.errno)]
        if found := _QUOTED.search(str(cause)):
            quoted = found[0]
            number = next((n for n in _NUMBERS if quoted.endswith(f"os error {n}")), None)
            return quoted if number is None else _MESSAGES[_NUMBERS.index(number)]
    return None


def file_of(error: BaseException) -> str | None:
    """The file that could not be written, if the error names it."""
    for cause in _causes(error):
        if isinstance(cause, OSError) and isinstance(cause.filename, str):
            return cause.filename
        if found := _FILE.search(str(cause)):
            return found[1] or found[2]
    return None


def explain(folder: Path, what: str, cause: str, saved: int | None) -> DiskFull:
    """The message for the user: what could not be written, why, how much is free, and how to continue."""
    checkpoint_text = f"the checkpoint of step {saved} is whole" if saved is not None else "there is no checkpoint yet"
    next_step = f"continue from step {saved}" if saved is not None else "start from the beginning"
    what = what.removeprefix(f"{folder}/")
    return DiskFull(
        f"{what} could not be written to {folder}: {cause} ({human_bytes(shutil.disk_usage(folder).free)} free); "
        f"{checkpoint_text}: make room, and {next_step} with {option('resume')}. `roll plan` says how much a run writes, "
        "and run.keep what it deletes"
    )


def human_bytes(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


class ClosingOnFullDisk(AbstractContextManager[None]):
    """Closes a file's writer. If the disk is already full, a failure to close is not reported as well."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._writer.close()
        except Exception as failure:
            if error is None or full_disk(failure) is None:
                raise


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error, its causes, and the members of exception groups."""
    seen: set[int] = set()
    queue: list[BaseException | None] = [error]
    while queue:
        current = queue.pop(0)
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        queue += [current.__cause__, None if current.__suppress_context__ else current.__context__]
        queue += getattr(current, "exceptions", ())
