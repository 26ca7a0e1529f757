"""The ledger: every transition of every sample, in the order they happened, for ever.

What always holds:

- Records are only appended. Going back to a checkpoint removes nothing; it appends `rolled_back` records.
- After `flush` returns, its records survive a kill and a power cut.
- No damaged record is ever read as a good one. What a kill left half-written at the end is cut off when the ledger is
  opened; damage anywhere else is corruption, and refused.
- A record is in the file once, whatever writes failed before.

A record is one line: eight hex digits of CRC-32, a space, compact JSON.

    6d1c4f0a {"sample":"t3/0","state":"queued","time_s":1700000000.5,"info":{"task":"t3"}}

Where a repair took damaged bytes out there is a gap in their place, so that all others stay where checkpoints and
rolled_back records say they are. It is a line too, and no reader of records sees it:

    0d0cbe5a {"lost":87}

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
import struct
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as quoted
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self
from zlib import crc32

from roll.atomic_files import sync_folder, to_json
from roll.config.errors import RunError, UserError
from roll.config.file_modes import like_its_folder

ROLLED_BACK = "rolled_back"
HEADER_BYTES = 9
BUFFER_BYTES = 2**20
"""More than this is not kept in memory: it is written, though not yet safe on disk."""
_BLOCK_BYTES = 2**20
_SAMPLE_AT = HEADER_BYTES + len('{"sample":"')
_TO_STATE = b'","state":"'
_UNDONE = f'{ROLLED_BACK}"'.encode()
_LOST = b'{"lost":'
_TAIL_BYTES = 2**20
GAP = "gap"
"""The mark of a place that a repair made."""
GAP_BYTES = 32
"""The least that a gap takes."""


@dataclass(frozen=True, slots=True)
class Transition:
    """A sample entered a state, for a reason, at a time (seconds since the epoch)."""

    sample: str
    state: str
    reason: str = ""
    time_s: float = field(default_factory=time.time)
    info: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The transition as a record of the ledger: the bytes of `to_json` of its fields, made several times faster."""
        reason = f',"reason":{quoted(self.reason)}' if self.reason else ""
        info = f',"info":{_object(self.info)}' if self.info else ""
        start = f'{{"sample":{quoted(self.sample)},"state":{quoted(self.state)}{reason}'
        payload = f'{start},"time_s":{_value(self.time_s)}{info}}}'.encode("ascii")
        return b"%08x %b\n" % (crc32(payload), payload)

    @classmethod
    def decode(cls, record: bytes) -> Transition:
        """The transition of a whole record."""
        return cls(**json.loads(record[HEADER_BYTES:]))


def gap(size: int) -> bytes:
    """A line of `size` bytes in place of records that were lost."""
    assert size >= GAP_BYTES, f"a gap of {size} bytes is too small"
    payload = b"%b%d}" % (_LOST, size)
    payload = payload.ljust(size - HEADER_BYTES - 1)
    return b"%08x %b\n" % (crc32(payload), payload)


def is_gap(line: bytes) -> bool:
    return line.startswith(_LOST, HEADER_BYTES)


def _value(value: Any) -> str:
    kind = type(value)
    if kind is str:
        return quoted(value)
    if kind is int or (kind is float and isfinite(value)):
        return repr(value)
    if kind is list:
        return f"[{','.join([_value(item) for item in value])}]"
    return to_json(value)


def _object(values: Mapping[str, Any]) -> str:
    parts = []
    try:
        for key, value in values.items():
            kind = type(value)
            if kind is str:
                parts.append(f"{quoted(key)}:{quoted(value)}")
            elif kind is int:
                parts.append(f"{quoted(key)}:{value!r}")
            else:
                parts.append(f"{quoted(key)}:{_value(value)}")
    except TypeError:  # a key that is not text, or a value that JSON cannot hold
        return to_json(values)
    return f"{{{','.join(parts)}}}"


class Ledger:
    """The record being written, by one process. Appends are buffered; the caller flushes at the end of each step."""

    def __init__(self, path: Path, descriptor: int, size: int, cut_bytes: int) -> None:
        self.path = path
        self.cut_bytes = cut_bytes
        """Bytes of a half-written tail that were cut off when the ledger was opened."""
        self._descriptor = descriptor
        self._flushed = size
        self._written = size
        self._buffer = bytearray()
        self._broken = ""

    @classmethod
    def open(cls, path: Path) -> Self:
        """The ledger at `path`, created if absent, checked from end to end and cut back to its last whole record."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            like_its_folder(path)
            sync_folder(path.parent)
            size = 0
            for offset, lines in record_blocks(path):
                size = offset + sum(map(len, lines)) + len(lines)
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
        return self._written + len(self._buffer)

    def append(self, transition: Transition) -> None:
        """Add a transition; it is safe on disk after the next flush. Where this raises, it was not added."""
        assert transition.state != ROLLED_BACK, "only roll_back writes rolled_back records"
        self._add(transition.encode())

    def append_many(self, transitions: Iterable[Transition]) -> None:
        """Add transitions in their order, as `append` would; where this raises, none was added."""
        taken = list(transitions)
        assert all(transition.state != ROLLED_BACK for transition in taken), "only roll_back writes rolled_back records"
        self._add(b"".join([transition.encode() for transition in taken]))

    def flush(self) -> None:
        """Write what is buffered and wait until it is on disk."""
        if self.position == self._flushed:
            return
        begin, content = self._written, bytes(self._buffer)
        self._write()
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            if begin > self._flushed:
                self._broken = "earlier records may be lost, resume the run"
            self._cut_back(begin)
            self._buffer[:0] = content
            raise RunError(f"cannot write to {self.path}: {error.strerror}") from error
        self._flushed = self._written

    def mark(self) -> str:
        """The checksum of the last record, flushed first; with the position, a checkpoint's place in the file."""
        self.flush()
        return mark_at(self.path, self._flushed)

    def roll_back(self, position: int, step: int, mark: str | None = None) -> list[str]:
        """Return to the checkpoint of `step`, taken at `position`, where `mark` was that; the samples it undid.

        Each sample whose state now is not the one it had at `position` gets one `rolled_back` record, flushed. Doing it
        twice, or again after dying half-way, adds only what is missing. Of the record only what follows `position` is
        read, unless it was gone back behind `position` since.
        """
        self.flush()
        found = _is_boundary(self.path, position, self._flushed)
        if not found or (mark is not None and mark_at(self.path, position) not in (mark, GAP)):
            raise RunError(
                f"{self.path} does not reach the checkpoint of step {step}: it was taken at byte {position}, and the "
                f"ledger's {self._flushed} bytes have {'another' if found else 'no'} record ending there; "
                f"`roll repair {self.path.parent}` mends it and says what was lost"
            )
        undone = _changed_since(self.path, position)
        info = {"position": position, "step": step}
        for sample in undone:
            self._add(Transition(sample, ROLLED_BACK, f"back to the checkpoint of step {step}", info=info).encode())
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

    def _add(self, records: bytes) -> None:
        if len(self._buffer) + len(records) > BUFFER_BYTES:
            self._write()
        self._buffer += records

    def _write(self) -> None:
        """Hand what is buffered to the operating system: all of it, or none."""
        if self._broken:
            raise RunError(f"cannot write to {self.path}: {self._broken}")
        rest = memoryview(bytes(self._buffer))
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            self._cut_back(self._written)
            raise RunError(f"cannot write to {self.path}: {error.strerror}") from error
        self._written += len(self._buffer)
        self._buffer.clear()

    def _cut_back(self, size: int) -> None:
        """Take what was written after `size` away again, so that writing it once more does not write it twice."""
        self._written = size
        try:
            os.ftruncate(self._descriptor, size)
        except OSError as error:
            self._broken = f"its end cannot be mended ({error.strerror}), resume the run"

    @staticmethod
    def read(path: Path) -> Iterator[Transition]:
        """Every transition on record, `rolled_back` ones too. Safe while the run is writing."""
        return (Transition.decode(line) for _, line in _records(path))

    @staticmethod
    def lineage(path: Path) -> dict[str, Transition]:
        """The last transition of each sample in the lineage of the final weights. Safe while the run is writing.

        A sample that was rolled back has the state it had at the checkpoint, or is absent if it did not exist then.
        """
        marks, end = _marks(path)
        finals = map(Transition.decode, _replay(path, 0, end, marks).finals())
        return {transition.sample: transition for transition in finals}


def record_blocks(
    path: Path, start: int = 0, end: int | None = None, block_bytes: int = _BLOCK_BYTES
) -> Iterator[tuple[int, list[bytes]]]:
    """Whole records from byte `start`, many at a time: where the first of them begins, and their lines without newline.

    Ends at `end`, at the end that the file has now, or before a half-written tail; damage before a whole record is
    refused.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: write the folder of a run that has a ledger") from error
    with file:
        size = os.fstat(file.fileno()).st_size
        end = size if end is None else min(end, size)
        file.seek(start)
        rest = b""
        while chunk := file.read(max(0, min(block_bytes, end - start - len(rest)))):
            content = rest + chunk
            lines = content.split(b"\n")
            rest = lines.pop()
            whole = _count_whole(lines)
            if whole:
                yield from _without_gaps(start, lines[:whole]) if _LOST in content else [(start, lines[:whole])]
            if whole < len(lines):
                _refuse_if_whole_follow(path, file, start + sum(map(len, lines[:whole])) + whole)
                return
            start += len(content) - len(rest)


def _without_gaps(start: int, lines: list[bytes]) -> Iterator[tuple[int, list[bytes]]]:
    """The records between gaps; after a gap at the end, none, where they would begin."""
    run: list[bytes] = []
    for line in lines:
        if is_gap(line):
            if run:
                yield start, run
            start, run = start + sum(map(len, run)) + len(run) + len(line) + 1, []
        else:
            run.append(line)
    yield start, run


def _count_whole(lines: list[bytes]) -> int:
    """How many whole records come first."""
    # Checksums are compared as text: parsed as a number, a flipped letter case would pass.
    sums = struct.pack(f">{len(lines)}I", *[crc32(line[HEADER_BYTES:]) for line in lines])
    if f"{sums.hex(' ', 4)} ".encode() == b"".join([line[:HEADER_BYTES] for line in lines]):
        return len(lines)
    return next((number for number, line in enumerate(lines) if not is_whole(line)), len(lines))


def is_whole(line: bytes) -> bool:
    """Whether a line without its newline is a record."""
    return line[:HEADER_BYTES] == b"%08x " % crc32(line[HEADER_BYTES:])


def _refuse_if_whole_follow(path: Path, file: IO[bytes], damage: int) -> None:
    file.seek(damage)
    if not any(line.endswith(b"\n") and is_whole(line[:-1]) for line in file):
        return
    number = sum(len(lines) for _, lines in record_blocks(path, 0, damage)) + 1
    raise RunError(
        f"{path} is corrupt: the record on line {number} is damaged, and whole ones follow it; "
        f"`roll repair {path.parent}` mends it and says what was lost"
    )


def _records(path: Path, start: int = 0, end: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Where each whole record begins, and its line."""
    for offset, lines in record_blocks(path, start, end):
        for line in lines:
            yield offset, line
            offset += len(line) + 1


def _is_boundary(path: Path, position: int, size: int) -> bool:
    """Whether a record, or the ledger, ends at `position`."""
    if not 0 < position <= size:
        return position == 0
    with path.open("rb") as file:
        file.seek(position - 1)
        return file.read(1) == b"\n"


def mark_at(path: Path, position: int) -> str:
    """The checksum of the record that ends at `position`, `GAP` if a gap does, "" if nothing does."""
    with path.open("rb") as file:
        start = max(0, position - _TAIL_BYTES)
        file.seek(start)
        content = file.read(position - start)
    if len(content) < position - start or not content.endswith(b"\n"):
        return ""
    line = content[content.rfind(b"\n", 0, -1) + 1 : -1]
    if not is_whole(line):
        return ""
    return GAP if is_gap(line) else line[: HEADER_BYTES - 1].decode("ascii")


def _split(line: bytes) -> tuple[bytes, bool]:
    """The sample as it is written, and whether the record undoes. No string of JSON holds what parts the two fields."""
    end = line.index(_TO_STATE, _SAMPLE_AT)
    return line[_SAMPLE_AT:end], line.startswith(_UNDONE, end + len(_TO_STATE))


class _Replay:
    """Each sample's states since the replay began: the current one, and those needed to go back to the marks.

    A state is the line of the record that began it; None is the state at the beginning, whatever that was. Samples are
    called as they are written. Nothing replayed goes back to where there is no mark.
    """

    def __init__(self, marks: set[int]) -> None:
        self._marks = sorted(marks)
        self._current: dict[bytes, tuple[int, bytes | None]] = {}
        self._past: dict[bytes, list[tuple[int, bytes | None]]] = {}

    def enter(self, offset: int, line: bytes) -> None:
        """Replay the record that begins at `offset`."""
        sample, undoes = _split(line)
        if self._marks and sample in self._current:
            since, state = self._current[sample]
            # The state now left may be returned to if a mark lies between the record that began it and this one.
            if bisect_right(self._marks, offset) > bisect_right(self._marks, since):
                self._past.setdefault(sample, []).append((since, state))
        position = Transition.decode(line).info["position"] if undoes else -1
        self._current[sample] = (offset, self.state_at(sample, position) if undoes else line)

    def state_at(self, sample: bytes, position: int) -> bytes | None:
        since, state = self._current.get(sample, (-1, None))
        if since < position:
            return state
        past = self._past.get(sample, [])
        before = bisect_right(past, position - 1, key=lambda entry: entry[0])
        return past[before - 1][1] if before else None

    def finals(self) -> Iterator[bytes]:
        """The states of samples that have one now."""
        return (state for _, state in self._current.values() if state is not None)

    def changed_since(self, position: int) -> list[bytes]:
        """The samples whose state now is not the one they had at `position`."""
        current = self._current.items()
        return [sample for sample, (_, state) in current if self.state_at(sample, position) is not state]


def _marks(path: Path, start: int = 0, end: int | None = None) -> tuple[set[int], int]:
    """The positions that rolled_back records between `start` and `end` went back to, and where the last record ends."""
    marks: set[int] = set()
    for offset, lines in record_blocks(path, start, end):
        marks.update(Transition.decode(line).info["position"] for line in lines if _UNDONE in line and _split(line)[1])
        start = offset + sum(map(len, lines)) + len(lines)
    return marks, start


def _replay(path: Path, start: int, end: int, marks: set[int]) -> _Replay:
    replay = _Replay(marks)
    for offset, line in _records(path, start, end):
        replay.enter(offset, line)
    return replay


def _changed_since(path: Path, position: int) -> list[str]:
    """The samples whose state now is not the one they had at `position`."""
    marks, end = _marks(path, position)
    start = position
    while (lowest := min(marks, default=start)) < start:
        marks |= _marks(path, lowest, start)[0]
        start = lowest
    changed = _replay(path, start, end, marks | {position}).changed_since(position)
    return [json.loads(b'"%b"' % sample) for sample in changed]
