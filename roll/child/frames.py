"""What goes between a parent and its child: payloads, each after its length."""

from __future__ import annotations

import struct
from typing import BinaryIO

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
