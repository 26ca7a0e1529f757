"""Files that are whole or absent: written aside, synced, and renamed into place."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import orjson

from roll.config.file_modes import like_its_folder
from roll.config.secrets import KNOWN

# Fast where the processor has SHA instructions (1.5 GB/s and more), and no collision passes for a match.
DIGEST = "sha256"


@contextmanager
def atomic_open(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes the name `path` only when the block ends well; until then the old one stands."""
    aside = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with aside.open("wb") as file:
            like_its_folder(aside)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise
    sync_folder(path.parent)


def atomic_write(path: Path, content: str | bytes) -> None:
    """Replace the file at `path`: a crash at any moment leaves the old content or the new, whole."""
    with atomic_open(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def sync_folder(path: Path) -> None:
    """Make the names in a folder (new files, renames) survive a power cut."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _plain(value: Any) -> Any:
    """What JSON can hold of a NumPy or torch value, or a path."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


def _without_nan(value: Any) -> Any:
    """The same value with null for every number that JSON cannot say."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str | int | None):
        return value
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return _without_nan(_plain(value))


_compact = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False, default=_plain)
_indented = json.JSONEncoder(indent=2, allow_nan=False, default=_plain)


def to_json(value: Any, *, indent: bool = False) -> str:
    """Valid JSON in ASCII, on one line unless indented; NaN and infinities become null, NumPy scalars numbers. Secrets
    that are known are left out of its texts."""
    encoder = _indented if indent else _compact
    text = _encoded(encoder, value)
    return _encoded(encoder, KNOWN.cleared(_without_nan(value))) if KNOWN.within(text) else text


def _encoded(encoder: json.JSONEncoder, value: Any) -> str:
    try:
        return encoder.encode(value)
    except ValueError:
        return encoder.encode(_without_nan(value))


def to_json_line(value: Any) -> bytes:
    """The same for what is large, ten times as fast: one line in UTF-8, with its end; NumPy arrays are lists."""
    try:
        line = orjson.dumps(value, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
        return to_json(value).encode() + b"\n" if KNOWN.within_bytes(line) else line
    except TypeError:  # a number of more than 64 bits, a key that is not text, text that is not Unicode
        return to_json(value).encode() + b"\n"


def file_digest(file: Path, algorithm: str = DIGEST) -> str:
    """The checksum of a file's bytes."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, algorithm).hexdigest()
