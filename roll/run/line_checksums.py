"""Checksums of the lines that a run writes: `sums/metrics.jsonl.crc` has those of `metrics.jsonl`, and so on.

The files themselves stay plain JSON lines. The checksum file has a record of 14 bytes per line: the CRC-32 of the line,
seeded with the file's name, and a check over name, line number and CRC. So a line that was changed, removed, duplicated
or moved within or between files is detected, and can be told apart from a damaged checksum.

    6d1c4f0a 93e1     the checksum of line 1
    0d0cbe5a 11c7     the checksum of line 2
    -------- 70a2     both lines are on disk: a checkpoint was saved, or the file is complete

Invariant: a checksum is written before its line, so a kill leaves at most one checksum without a line. A file without
checksums, from an older version or copied alone, is read unchecked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

from roll.config.errors import RunError
from roll.config.file_modes import inherit_folder_mode

FOLDER = "sums"
_RECORD_BYTES = 14
_SETTLED = b"--------"


def checksums_path(run: Path, file: Path) -> Path:
    """The path of the checksums of a run's file."""
    return run / FOLDER / f"{_name(run, file)}.crc"


@dataclass(frozen=True)
class Checksums:
    """The content of a checksum file."""

    lines: tuple[int | None, ...] = ()
    """The checksum of each line; None if it is damaged itself."""
    settled: int = 0
    """Number of lines that are known to have been in the file."""
    damaged: bool = False
    """Whether some of it differs from what was written."""


@dataclass
class Audit:
    """A file's lines, compared with their checksums."""

    lines: list[bytes] = field(default_factory=list)
    """Complete lines, without newline."""
    torn: bytes = b""
    """A last line without newline."""
    bad: list[int] = field(default_factory=list)
    """Numbers, from 0, of lines that the run did not write, or not at this position."""
    missing: int = 0
    """Lines that the run wrote and that are missing; changed lines are not counted."""
    sums_damaged: bool = False
    """Whether checksums are damaged, or there are fewer checksums than lines."""
    has_sums: bool = True

    def refuse(self, run: Path, file: Path) -> None:
        """Raises `RunError` if something is wrong."""
        remedy = f"`roll repair {run}` moves what is damaged aside and says what was lost"
        if self.bad:
            raise RunError(
                f"{file} is damaged on line {self.bad[0] + 1}, which is not what the run wrote there: {remedy}"
            )
        if self.missing:
            lacks = "a line" if self.missing == 1 else f"{self.missing} lines"
            raise RunError(f"{file} is damaged, it lacks {lacks} that the run wrote: {remedy}")
        if self.sums_damaged:
            raise RunError(f"{checksums_path(run, file)} is damaged: {remedy}")


def audit(run: Path, file: Path) -> Audit:
    """Compares a file with its checksums, also while it is being written. Raises `FileNotFoundError` without a file."""
    before = read_checksums(run, file)
    *lines, torn = file.read_bytes().split(b"\n")
    after = read_checksums(run, file)
    if before is None or after is None:
        return Audit(lines, torn, has_sums=False)
    min_lines = max(before.settled, len(before.lines) - 1)
    return compare_with_checksums(_name(run, file), lines, torn, after, min_lines)


def compare_with_checksums(name: str, lines: Sequence[bytes], torn: bytes, sums: Checksums, min_lines: int) -> Audit:
    """Finds the lines that were written under that name; at least `min_lines` lines must be present."""
    found = Audit(list(lines), torn, sums_damaged=sums.damaged)
    positions: dict[int, list[int]] = {}
    for position in reversed(range(len(sums.lines))):
        if (value := sums.lines[position]) is not None:
            positions.setdefault(value, []).append(position)
    start, next_position, matched, unknown = crc32(name.encode()), 0, 0, 0
    for number, line in enumerate(lines):
        candidates = positions.get(crc32(line, start), [])
        while candidates and candidates[-1] < next_position:
            candidates.pop()
        if candidates:
            matched += 1
            next_position = candidates.pop() + 1
        elif next_position < len(sums.lines) and sums.lines[next_position] is None:
            unknown += 1
            next_position += 1
        elif next_position == len(sums.lines) and line not in lines[:number]:
            unknown += 1
            found.sums_damaged = True
        else:
            found.bad.append(number)
    expected = max(min(min_lines, len(sums.lines)), next_position)
    found.missing = max(expected - matched - unknown - len(found.bad), 0)
    return found


def read_checksums(run: Path, file: Path) -> Checksums | None:
    """The checksums of a file; None if it has none."""
    try:
        content = checksums_path(run, file).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not content:  # a power cut came before they were on disk
        return None
    return _parse(_name(run, file), content)


def write_checksums(run: Path, file: Path, values: Iterable[int]) -> None:
    """Replaces the checksums of a complete file by `values`, one per line, computed by `line_checksum`."""
    path, name = checksums_path(run, file), _name(run, file)
    records = [_record(name, number, b"%08x" % value) for number, value in enumerate(values)]
    records.append(_record(name, len(records), _SETTLED))
    _make_folder(run, path.parent)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    temporary.write_bytes(b"".join(records))
    inherit_folder_mode(temporary)
    os.replace(temporary, path)


def drop_checksums(run: Path, file: Path) -> None:
    """Deletes the checksums of a file, before it is replaced or deleted."""
    checksums_path(run, file).unlink(missing_ok=True)


def line_checksum(run: Path, file: Path) -> Callable[[bytes | memoryview], int]:
    """A function that computes the checksum of a line of the file, given without newline."""
    start = crc32(_name(run, file).encode())
    return lambda line: crc32(line, start)


class ChecksumWriter:
    """Writes the checksums of a file that grows line by line."""

    def __init__(self, run: Path, file: Path) -> None:
        """The file must exist; if it is damaged, it is refused."""
        self._name = _name(run, file)
        self._start = crc32(self._name.encode())
        found = audit(run, file)
        found.refuse(run, file)
        lines, sums = found.lines, read_checksums(run, file)
        if sums is None or len(sums.lines) != len(lines) or sums.settled != len(lines):
            write_checksums(run, file, [crc32(line, self._start) for line in lines])
        self._file = checksums_path(run, file).open("ab", buffering=0)
        self._count = len(lines)

    def add(self, line: bytes) -> None:
        """Writes the checksum of a line, given without newline, before the line itself is written."""
        self._file.write(_record(self._name, self._count, b"%08x" % crc32(line, self._start)))
        self._count += 1

    def settle(self) -> None:
        """Records that all lines so far are on disk."""
        self._file.write(_record(self._name, self._count, _SETTLED))
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _make_folder(run: Path, folder: Path) -> None:
    if not folder.is_dir():
        if folder != run:
            _make_folder(run, folder.parent)
        folder.mkdir(exist_ok=True)
        inherit_folder_mode(folder)


def _parse(name: str, content: bytes) -> Checksums:
    lines: list[int | None] = []
    settled, damaged = 0, False
    for begin in range(0, len(content) - _RECORD_BYTES + 1, _RECORD_BYTES):
        record = content[begin : begin + _RECORD_BYTES]
        value, mark = record[:8], _record(name, len(lines), _SETTLED)
        whole = record == _record(name, len(lines), value)
        damaged = damaged or not whole
        if value == _SETTLED or (not whole and record[8:] == mark[8:]):
            settled = len(lines)
        else:
            lines.append(int(value, 16) if whole else None)
    return Checksums(tuple(lines), settled, damaged)


def _record(name: str, number: int, value: bytes) -> bytes:
    return b"%b %04x\n" % (value, crc32(b"%b %d %b" % (name.encode(), number, value)) & 0xFFFF)


def _name(run: Path, file: Path) -> str:
    return file.relative_to(run).as_posix()
