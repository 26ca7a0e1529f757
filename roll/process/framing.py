"""Framing of messages between a parent and its child: each payload is preceded by its length.

A child runs user code, which may act on model output, so the parent treats its messages as untrusted data: `Reader`
unpickles only the types that the parent lists, and the parent limits the length of a payload.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterable
from typing import Any, BinaryIO

HEADER = struct.Struct("!Q")


def frame(payload: bytes) -> bytes:
    """A payload with its length header."""
    return HEADER.pack(len(payload)) + payload


def read_payload(stream: BinaryIO) -> bytes | None:
    """Blocks until the next payload has arrived; None when the other side has closed the connection."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    payload = stream.read(size)
    return payload if len(payload) == size else None


class Reader:
    """Unpickles payloads of Python's plain types and of `kinds`. A payload that names another class or function, such as
    one that would run a command, raises `UnpicklingError` before anything of it is called."""

    def __init__(self, kinds: Iterable[type]) -> None:
        self._kinds = {(kind.__module__, kind.__qualname__): kind for kind in kinds}

    def read(self, payload: bytes) -> Any:
        return _Unpickler(payload, self._kinds).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, payload: bytes, kinds: dict[tuple[str, str], type]) -> None:
        super().__init__(io.BytesIO(payload))
        self._kinds = kinds

    def find_class(self, module: str, name: str) -> type:
        try:
            return self._kinds[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is not among the types that this process may send") from None
