"""Atomic files: written to a temporary file, synced, and renamed, so they are complete or absent."""

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

from roll.config.file_modes import inherit_folder_mode
from roll.config.secrets import KNOWN

# Fast on processors with SHA instructions (1.5 GB/s and more), and collisions are practically impossible.
DIGEST = "sha256"


@contextmanager
def atomic_open(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file that gets the name `path` only when the block ends without an error; until then the old file
    remains."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            inherit_folder_mode(temporary)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise
    sync_folder(path.parent)


def atomic_write(path: Path, content: str | bytes) -> None:
    """Replaces the file at `path`: a crash at any moment leaves either the complete old or the complete new content."""
    with atomic_open(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def sync_folder(path: Path) -> None:
    """Makes the names in a folder (new files, renames) survive a power cut."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _json_form(value: Any) -> Any:
    """The JSON form of a NumPy or torch value, or of a path."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


def _without_nan(value: Any) -> Any:
    """The same value with null for every number that JSON cannot express."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str | int | None):
        return value
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return _without_nan(_json_form(value))


_compact = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False, default=_json_form)
_indented = json.JSONEncoder(indent=2, allow_nan=False, default=_json_form)


def to_json(value: Any, *, indent: bool = False) -> str:
    """Valid JSON in ASCII, on one line unless indented; NaN and infinities become null, NumPy scalars numbers. Known
    secrets are removed from its strings."""
    encoder = _indented if indent else _compact
    text = _encoded(encoder, value)
    return _encoded(encoder, KNOWN.cleared(_without_nan(value))) if KNOWN.within(text) else text


def _encoded(encoder: json.JSONEncoder, value: Any) -> str:
    try:
        return encoder.encode(value)
    except ValueError:
        return encoder.encode(_without_nan(value))


def to_json_line(value: Any) -> bytes:
    """The same for large values, ten times as fast: one line of UTF-8 with its newline; NumPy arrays become lists."""
    try:
        line = orjson.dumps(value, default=_json_form, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
        return to_json(value).encode() + b"\n" if KNOWN.within_bytes(line) else line
    except TypeError:  # a number of more than 64 bits, a key that is not text, text that is not Unicode
        return to_json(value).encode() + b"\n"


def file_digest(file: Path, algorithm: str = DIGEST) -> str:
    """The checksum of a file's bytes."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, algorithm).hexdigest()
