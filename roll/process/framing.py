"""What goes between a parent and its child: payloads, each after its length.

A child runs users' code, and that may act on what a model said: what comes from it is read as data (`Reader`), of the
types that the parent names and no others, and no payload is longer than the parent says.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterable
from typing import Any, BinaryIO

HEADER = struct.Struct("!Q")


def frame(payload: bytes) -> bytes:
    """A payload, ready to be written."""
    return HEADER.pack(len(payload)) + payload


def read_payload(stream: BinaryIO) -> bytes | None:
    """The next payload, waited for as long as it takes, or None when the other side has gone."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    payload = stream.read(size)
    return payload if len(payload) == size else None


class Reader:
    """Reads pickled payloads of Python's plain types and of `kinds`. A payload that names another class or function, such
    as one that would run a command, is refused with an `UnpicklingError` before anything of it is called."""

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
            raise pickle.UnpicklingError(f"{module}.{name} is not among what this process may send") from None
