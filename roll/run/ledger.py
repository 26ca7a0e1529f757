"""The ledger: every transition of every sample, in the order they happened, for ever.

What always holds:

- Records are only appended. Going back to a checkpoint removes nothing; it appends `rolled_back` records.
- After `flush` returns, its records survive a kill and a power cut.
- No damaged record is ever read as a good one. What a kill left half-written at the end is cut off when the ledger is
  opened; damage anywhere else is corruption, and refused.

A record is one line: eight hex digits of CRC-32, a space, compact JSON.

    6d1c4f0a {"sample":"t3/0","state":"queued","time_s":1700000000.5,"info":{"task":"t3"}}

Rolling back, by example. A checkpoint is taken at byte 200; `a` is trained and `c` appears after it; the run dies and
goes back to the checkpoint:

    byte   0  a kept
    byte 100  b trained
    byte 200  a trained                      lineage before:  a trained, b trained, c queued
    byte 300  c queued
    byte 400  a rolled_back position=200     lineage after:   a kept, b trained
    byte 500  c rolled_back position=200
"""

from __future__ import annotations

import json
import os
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from zlib import crc32

from roll.config.errors import RunError, UserError
from roll.run.files import sync_folder, to_json

ROLLED_BACK = "rolled_back"
_HEADER_BYTES = 9


@dataclass(frozen=True, slots=True)
class Transition:
    """A sample entered a state, for a reason, at a time (seconds since the epoch)."""

    sample: str
    state: str
    reason: str = ""
    time_s: float = field(default_factory=time.time)
    info: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The transition as a record of the ledger."""
        fields: dict[str, Any] = {"sample": self.sample, "state": self.state}
        if self.reason:
            fields["reason"] = self.reason
        fields["time_s"] = self.time_s
        if self.info:
            fields["info"] = self.info
        payload = to_json(fields).encode("ascii")
        return b"%08x %b\n" % (crc32(payload), payload)

    @classmethod
    def decode(cls, record: bytes) -> Transition:
        """The transition of a whole record."""
        return cls(**json.loads(record[_HEADER_BYTES:]))


class Ledger:
    """The record being written, by one process. Appends are buffered; the caller flushes at the end of each step."""

    def __init__(self, path: Path, descriptor: int, size: int, cut_bytes: int) -> None:
        self.path = path
        self.cut_bytes = cut_bytes
        """Bytes of a half-written tail that were cut off when the ledger was opened."""
        self._descriptor = descriptor
        self._flushed = size
        self._position = size
        self._buffer: list[bytes] = []

    @classmethod
    def open(cls, path: Path) -> Ledger:
        """The ledger at `path`, created if absent, checked from end to end and cut back to its last whole record."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            sync_folder(path.parent)
            size = 0
            for offset, record in _records(path):
                size = offset + len(record)
            cut_bytes = os.fstat(descriptor).st_size - size
            if cut_bytes:
                os.ftruncate(descriptor, size)
                os.fsync(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, descriptor, size, cut_bytes)

    @property
    def position(self) -> int:
        """Bytes of all records, flushed and buffered: where the next one will begin."""
        return self._position

    def append(self, transition: Transition) -> None:
        """Add a transition; it is safe on disk after the next flush."""
        assert transition.state != ROLLED_BACK, "only roll_back writes rolled_back records"
        self._append(transition)

    def flush(self) -> None:
        """Write what is buffered and wait until it is on disk."""
        if not self._buffer:
            return
        rest = memoryview(b"".join(self._buffer))
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            os.fsync(self._descriptor)
        except OSError as error:
            # What was written of the buffer goes again, so that flushing once more does not write it twice.
            os.ftruncate(self._descriptor, self._flushed)
            raise RunError(f"cannot write to {self.path}: {error.strerror}") from error
        self._buffer.clear()
        self._flushed = self._position

    def roll_back(self, position: int, step: int) -> list[str]:
        """Return to the checkpoint of `step`, taken at `position`; the samples it undid.

        Each sample whose state now is not the one it had at `position` gets one `rolled_back` record, flushed. Doing it
        twice, or again after dying half-way, adds only what is missing.
        """
        self.flush()
        if not _is_boundary(self.path, position, self._flushed):
            raise RunError(
                f"{self.path} does not reach the checkpoint of step {step}: it was taken at byte {position}, and the "
                f"ledger's {self._flushed} bytes have no record ending there"
            )
        undone = [sample for sample, history in _replay(self.path, position).items() if history.differs_from(position)]
        for sample in undone:
            info = {"position": position, "step": step}
            self._append(Transition(sample, ROLLED_BACK, f"back to the checkpoint of step {step}", info=info))
        self.flush()
        return undone

    def close(self) -> None:
        """Flush and let go of the file."""
        if self._descriptor < 0:
            return
        try:
            self.flush()
        finally:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _append(self, transition: Transition) -> None:
        record = transition.encode()
        self._buffer.append(record)
        self._position += len(record)

    @staticmethod
    def read(path: Path) -> Iterator[Transition]:
        """Every transition on record, `rolled_back` ones too. Safe while the run is writing."""
        return (Transition.decode(record) for _, record in _records(path))

    @staticmethod
    def lineage(path: Path) -> dict[str, Transition]:
        """The last transition of each sample in the lineage of the final weights.

        A sample that was rolled back has the state it had at the checkpoint, or is absent if it did not exist then.
        """
        finals = {sample: history.current for sample, history in _replay(path).items()}
        return {sample: transition for sample, transition in finals.items() if transition is not None}


def _records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of every whole record, up to a half-written tail; damage before a whole record is refused."""
    try:
        file = path.open("rb")
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: write the folder of a run that has a ledger") from error
    damaged_line = 0
    offset = 0
    with file:
        for number, line in enumerate(file, start=1):
            if not _is_whole(line):
                damaged_line = damaged_line or number
            elif damaged_line:
                raise RunError(
                    f"{path} is corrupt: the record on line {damaged_line} is damaged, and whole ones follow it; "
                    "restore the file, or start over with --restart"
                )
            else:
                yield offset, line
            offset += len(line)


def _is_whole(line: bytes) -> bool:
    # The checksum is compared as text: parsed as a number, a flipped letter case would pass.
    return line.endswith(b"\n") and line[:_HEADER_BYTES] == b"%08x " % crc32(line[_HEADER_BYTES:-1])


def _is_boundary(path: Path, position: int, size: int) -> bool:
    """Whether a record, or the ledger, ends at `position`."""
    if not 0 < position <= size:
        return position == 0
    with path.open("rb") as file:
        file.seek(position - 1)
        return file.read(1) == b"\n"


class _History:
    """One sample's states: the current one, and those needed to go back to the positions somebody went back to."""

    __slots__ = ("_past", "current", "since")

    def __init__(self) -> None:
        self.current: Transition | None = None
        self.since = -1
        self._past: list[tuple[int, Transition | None]] = [(-1, None)]

    def enter(self, offset: int, transition: Transition | None, keep_last: bool) -> None:
        if keep_last and self.since >= 0:
            self._past.append((self.since, self.current))
        self.current, self.since = transition, offset

    def at(self, position: int) -> Transition | None:
        if self.since < position:
            return self.current
        return self._past[bisect_right(self._past, position - 1, key=lambda entry: entry[0]) - 1][1]

    def differs_from(self, position: int) -> bool:
        return self.at(position) is not self.current


def _replay(path: Path, *positions: int) -> dict[str, _History]:
    """The history of each sample, kept at the positions given and at those of every rolled_back record."""
    marker = f'"state":"{ROLLED_BACK}"'.encode()
    candidates = (Transition.decode(record) for _, record in _records(path) if marker in record)
    marks = sorted({*positions, *(undo.info["position"] for undo in candidates if undo.state == ROLLED_BACK)})
    histories: dict[str, _History] = {}
    for offset, record in _records(path):
        transition = Transition.decode(record)
        history = histories.setdefault(transition.sample, _History())
        undoes = transition.state == ROLLED_BACK
        # The state now left may be returned to if a mark lies between the record that began it and this one.
        between = bisect_right(marks, offset) > bisect_right(marks, history.since)
        history.enter(offset, history.at(transition.info["position"]) if undoes else transition, keep_last=between)
    return histories
