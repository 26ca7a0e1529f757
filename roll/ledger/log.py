"""The ledger: every transition of every sample, in the order they happened. Nothing is ever removed.

Invariants:

- Records are only appended. Rolling back to a checkpoint removes nothing; it appends `rolled_back` records.
- After `flush` returns, its records survive a kill and a power cut.
- No damaged record is ever read as a good one. A half-written record at the end, left by a kill, is cut off when the
  ledger is opened; damage anywhere else is corruption, and the ledger is refused.
- A record is in the file once, whatever writes failed before.

A record is one line: eight hex digits of CRC-32, a space, compact JSON.

    6d1c4f0a {"sample":"t3/0","state":"queued","time_s":1700000000.5,"info":{"task":"t3"}}

A repair replaces damaged bytes by a gap of the same size, so that all other records keep the positions that checkpoints
and rolled_back records name. A gap is a line too; readers of records skip it:

    0d0cbe5a {"lost":87}

Rolling back, by example. A checkpoint is taken at byte 200; `a` is trained and `c` appears after it; the run dies and
resumes from the checkpoint:

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
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self
from zlib import crc32

import orjson

from roll.atomic_files import sync_folder, to_json
from roll.config.errors import RunError, UserError
from roll.config.file_modes import inherit_folder_mode

ROLLED_BACK = "rolled_back"
HEADER_BYTES = 9
BUFFER_BYTES = 2**20
"""A larger buffer is written to the file, though not yet synced to disk."""
_BLOCK_BYTES = 2**20
_BEGIN = b'{"sample":'
_CRC_OF_BEGIN = crc32(_BEGIN)
_SAMPLE_AT = HEADER_BYTES + len(_BEGIN) + 1
_TO_STATE = b'","state":"'
_ROLLED_BACK_STATE = f'{ROLLED_BACK}"'.encode()
_LOST = b'{"lost":'
_TAIL_BYTES = 2**20
_PLAIN_ONLY = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS
GAP = "gap"
"""The mark of a position at which a gap ends."""
GAP_BYTES = 32
"""Minimum size of a gap."""


@dataclass(slots=True)  # not frozen, which would double the time to make one
class Transition:
    """A sample entered a state, for a reason, at a time (seconds since the epoch). Nothing changes it."""

    sample: str
    state: str
    reason: str = ""
    time_s: float = field(default_factory=time.time)
    info: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The transition as a record of the ledger: JSON in ASCII, with null for numbers that JSON cannot express."""
        fields: dict[str, Any] = {"sample": self.sample, "state": self.state}
        if self.reason:
            fields["reason"] = self.reason
        fields["time_s"] = self.time_s
        if self.info:
            fields["info"] = self.info
        try:
            payload = orjson.dumps(fields, option=_PLAIN_ONLY)
        except TypeError:  # values that only `to_json` can write
            payload = b""
        if not payload or not payload.isascii():
            payload = to_json(fields).encode("ascii")
        return b"%08x %b\n" % (crc32(payload), payload)

    @classmethod
    def decode(cls, record: bytes) -> Transition:
        """The transition of a complete record."""
        return cls(**json.loads(record[HEADER_BYTES:]))


class RecordEncoder:
    """Encodes transitions one by one, each as `Transition.encode` does. Transitions in a row that have the same time and
    info (the same objects), as those of samples that move together have, share the encoding of these."""

    def __init__(self) -> None:
        self._last = Transition("", "", "", 0.0)
        """The last transition that was encoded by itself."""
        self._record = self._last.encode()
        self._shared = b""
        """What its record has after its sample; empty until another transition shares it."""

    def encode(self, transition: Transition) -> bytes:
        last = self._last
        if (
            transition.info is not last.info
            or transition.time_s is not last.time_s
            or transition.state != last.state
            or transition.reason != last.reason
            or not (transition.sample.isascii() and last.sample.isascii())
        ):
            self._last, self._record, self._shared = transition, transition.encode(), b""
            return self._record
        if not self._shared:
            self._shared = self._record[HEADER_BYTES + len(_BEGIN) + len(orjson.dumps(last.sample)) : -1]
        name, shared = orjson.dumps(transition.sample), self._shared
        return b"%08x %b%b%b\n" % (crc32(shared, crc32(name, _CRC_OF_BEGIN)), _BEGIN, name, shared)


def gap(size: int) -> bytes:
    """A line of `size` bytes that replaces lost records."""
    assert size >= GAP_BYTES, f"a gap of {size} bytes is too small"
    payload = b"%b%d}" % (_LOST, size)
    payload = payload.ljust(size - HEADER_BYTES - 1)
    return b"%08x %b\n" % (crc32(payload), payload)


def is_gap(line: bytes) -> bool:
    return line.startswith(_LOST, HEADER_BYTES)


class Ledger:
    """The ledger of a run, written by one process. Appends are buffered; the caller flushes at the end of each step."""

    def __init__(self, path: Path, descriptor: int, size: int, truncated_bytes: int) -> None:
        self.path = path
        self.truncated_bytes = truncated_bytes
        """Size of the half-written tail that was cut off when the ledger was opened."""
        self._descriptor = descriptor
        self._flushed = size
        self._written = size
        self._buffer: list[bytes] = []
        self._buffered = 0
        """Bytes in the buffer."""
        self._encoder = RecordEncoder()
        self._broken = ""

    @classmethod
    def open(cls, path: Path) -> Self:
        """Opens the ledger at `path`, or creates it; checks every record and cuts a half-written tail off."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            inherit_folder_mode(path)
            sync_folder(path.parent)
            size = 0
            for offset, lines in record_blocks(path):
                size = offset + sum(map(len, lines)) + len(lines)
            truncated_bytes = os.fstat(descriptor).st_size - size
            if truncated_bytes:
                os.ftruncate(descriptor, size)
                os.fsync(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, descriptor, size, truncated_bytes)

    @property
    def position(self) -> int:
        """Bytes of all records, flushed and buffered: where the next record will begin."""
        return self._written + self._buffered

    def append(self, transition: Transition) -> None:
        """Adds a transition; it is on disk after the next flush. If this raises, it was not added."""
        assert transition.state != ROLLED_BACK, "only roll_back writes rolled_back records"
        self._add(self._encoder.encode(transition))

    def append_many(self, transitions: Iterable[Transition]) -> None:
        """Adds transitions in their order, as `append` does; if this raises, none was added."""
        batch = list(transitions)
        assert all(transition.state != ROLLED_BACK for transition in batch), "only roll_back writes rolled_back records"
        self._add(b"".join(map(self._encoder.encode, batch)))

    def flush(self) -> None:
        """Writes the buffer and waits until it is on disk."""
        if self.position == self._flushed:
            return
        begin, content = self._written, b"".join(self._buffer)
        self._buffer = [content]
        self._write()
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            if begin > self._flushed:
                self._broken = "earlier records may be lost, resume the run"
            self._truncate(begin)
            self._buffer.insert(0, content)
            self._buffered += len(content)
            raise RunError(f"cannot write to {self.path}: {error.strerror}") from error
        self._flushed = self._written

    def mark(self) -> str:
        """Flushes, then returns the checksum of the last record. Together with the position it identifies a checkpoint's
        point in the ledger."""
        self.flush()
        return mark_at(self.path, self._flushed)

    def roll_back(self, position: int, step: int, mark: str | None = None) -> list[str]:
        """Rolls back to the checkpoint of `step`, taken at `position` with `mark`; returns the samples that it rolled
        back.

        Each sample whose state differs from its state at `position` gets one `rolled_back` record, flushed. Calling it
        twice, or again after a crash half-way, appends only the missing records. It reads only what follows `position`,
        unless an earlier rollback after `position` went to before it.
        """
        self.flush()
        found = _is_boundary(self.path, position, self._flushed)
        if not found or (mark is not None and mark_at(self.path, position) not in (mark, GAP)):
            raise RunError(
                f"{self.path} does not reach the checkpoint of step {step}: it was taken at byte {position}, and the "
                f"ledger's {self._flushed} bytes have {'another' if found else 'no'} record ending there; "
                f"`roll repair {self.path.parent}` repairs it and reports what was lost"
            )
        changed = _changed_since(self.path, position)
        info = {"position": position, "step": step}
        for sample in changed:
            self._add(Transition(sample, ROLLED_BACK, f"back to the checkpoint of step {step}", info=info).encode())
        self.flush()
        return changed

    def close(self) -> None:
        """Flushes and closes the file."""
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
        if self._buffered + len(records) > BUFFER_BYTES:
            self._write()
        self._buffer.append(records)
        self._buffered += len(records)

    def _write(self) -> None:
        """Writes the whole buffer to the file (without sync), or none of it."""
        if self._broken:
            raise RunError(f"cannot write to {self.path}: {self._broken}")
        rest = memoryview(b"".join(self._buffer))
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            self._truncate(self._written)
            raise RunError(f"cannot write to {self.path}: {error.strerror}") from error
        self._written += self._buffered
        self._buffer.clear()
        self._buffered = 0

    def _truncate(self, size: int) -> None:
        """Truncates the file to `size` after a failed write, so that writing again does not duplicate records."""
        self._written = size
        try:
            os.ftruncate(self._descriptor, size)
        except OSError as error:
            self._broken = f"its end cannot be repaired ({error.strerror}), resume the run"

    @staticmethod
    def read(path: Path) -> Iterator[Transition]:
        """Every transition in the ledger, including `rolled_back` ones. Safe while the run is writing."""
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
    """Complete records from byte `start`, in blocks: the offset of the block's first record, and its lines without
    newline.

    Stops at `end`, at the current end of the file, or before a half-written tail. Damage that is followed by a complete
    record is refused.
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
    """The runs of records between gaps, with their offsets; after a gap at the end, an empty run."""
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
    """The number of complete records before the first damaged one."""
    # Checksums are compared as text: parsed as numbers, a flipped letter case would pass.
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
        f"`roll repair {path.parent}` repairs it and reports what was lost"
    )


def _records(path: Path, start: int = 0, end: int | None = None) -> Iterator[tuple[int, bytes]]:
    """The offset and the line of each complete record."""
    for offset, lines in record_blocks(path, start, end):
        for line in lines:
            yield offset, line
            offset += len(line) + 1


def _is_boundary(path: Path, position: int, size: int) -> bool:
    """Whether a record ends at `position`, or `position` is the start of the ledger."""
    if not 0 < position <= size:
        return position == 0
    with path.open("rb") as file:
        file.seek(position - 1)
        return file.read(1) == b"\n"


def mark_at(path: Path, position: int) -> str:
    """The checksum of the record that ends at `position`, `GAP` if a gap ends there, "" if nothing does."""
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
    """The sample's name as written in JSON, and whether the record is a rollback. No JSON string contains the separator
    of the two fields."""
    end = line.index(_TO_STATE, _SAMPLE_AT)
    return line[_SAMPLE_AT:end], line.startswith(_ROLLED_BACK_STATE, end + len(_TO_STATE))


class _Replay:
    """Each sample's states since the replay began: the current one, and those needed to roll back to the marks.

    A state is the line of the record that began it; None is the state before the replay, whatever that was. Sample names
    stay in their JSON form. No replayed record rolls back to a position that is not a mark.
    """

    def __init__(self, marks: set[int]) -> None:
        self._marks = sorted(marks)
        self._current: dict[bytes, tuple[int, bytes | None]] = {}
        self._past: dict[bytes, list[tuple[int, bytes | None]]] = {}

    def enter(self, offset: int, line: bytes) -> None:
        """Replays the record that begins at `offset`."""
        sample, is_rollback = _split(line)
        if self._marks and sample in self._current:
            since, state = self._current[sample]
            # A rollback may return to the state left now if a mark is between the record that began it and this one.
            if bisect_right(self._marks, offset) > bisect_right(self._marks, since):
                self._past.setdefault(sample, []).append((since, state))
        position = Transition.decode(line).info["position"] if is_rollback else -1
        self._current[sample] = (offset, self.state_at(sample, position) if is_rollback else line)

    def state_at(self, sample: bytes, position: int) -> bytes | None:
        since, state = self._current.get(sample, (-1, None))
        if since < position:
            return state
        past = self._past.get(sample, [])
        before = bisect_right(past, position - 1, key=lambda entry: entry[0])
        return past[before - 1][1] if before else None

    def finals(self) -> Iterator[bytes]:
        """The current states of all samples that have one."""
        return (state for _, state in self._current.values() if state is not None)

    def changed_since(self, position: int) -> list[bytes]:
        """The samples whose current state differs from the one they had at `position`."""
        current = self._current.items()
        return [sample for sample, (_, state) in current if self.state_at(sample, position) is not state]


def _marks(path: Path, start: int = 0, end: int | None = None) -> tuple[set[int], int]:
    """The positions that rolled_back records between `start` and `end` returned to, and where the last record ends."""
    marks: set[int] = set()
    for offset, lines in record_blocks(path, start, end):
        marks.update(
            Transition.decode(line).info["position"] for line in lines if _ROLLED_BACK_STATE in line and _split(line)[1]
        )
        start = offset + sum(map(len, lines)) + len(lines)
    return marks, start


def _replay(path: Path, start: int, end: int, marks: set[int]) -> _Replay:
    replay = _Replay(marks)
    for offset, line in _records(path, start, end):
        replay.enter(offset, line)
    return replay


def _changed_since(path: Path, position: int) -> list[str]:
    """The samples whose current state differs from the one they had at `position`."""
    marks, end = _marks(path, position)
    start = position
    while (lowest := min(marks, default=start)) < start:
        marks |= _marks(path, lowest, start)[0]
        start = lowest
    changed = _replay(path, start, end, marks | {position}).changed_since(position)
    return [json.loads(b'"%b"' % sample) for sample in changed]
