"""Repairs a ledger: damaged bytes become gaps, and the newest checkpoint's position stays the same.

Invariants:

- Complete records stay, byte for byte, except those of samples whose history is inconsistent without the lost records.
- The first `position` bytes of the repaired ledger are the records before the checkpoint, so that the checkpoint and
  rolled_back records still point to the right byte: a gap is longer where bytes are missing, shorter where bytes were
  added.
- Every sample that was in flight at the checkpoint has a record that names its task.

By example. The checkpoint was taken at byte 300, and a flipped bit damages the record of `b`:

    byte   0  a queued         byte   0  a queued
    byte 100  b queu?d    →    byte 100  (gap of 100 bytes)
    byte 200  a trained        byte 200  a trained
    byte 300  c queued         byte 300  c queued
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from roll.atomic_files import atomic_open
from roll.ledger.log import GAP, GAP_BYTES, HEADER_BYTES, ROLLED_BACK, Transition, gap, is_gap, is_whole
from roll.ledger.sample_history import history_of

_ENDS = ("trained", "dropped")
_COPY_BYTES = 2**20


@dataclass(frozen=True)
class CheckpointMark:
    """The newest checkpoint's position in the ledger."""

    position: int = 0
    mark: str | None = None
    """Checksum of the record that ended there; None if unknown."""
    in_flight: Mapping[str, str] = field(default_factory=dict)
    """Samples that were in flight at the checkpoint, with their tasks."""


@dataclass(frozen=True)
class _Piece:
    """A part of the repaired ledger: lines of the old one, or `replacement` bytes that replace lost ones."""

    start: int
    end: int
    replacement: bytes | None = None

    @property
    def size(self) -> int:
        return self.end - self.start if self.replacement is None else len(self.replacement)


@dataclass(frozen=True)
class RepairedLog:
    """What a repair does to a ledger, or would do."""

    pieces: tuple[_Piece, ...]
    gaps: tuple[tuple[int, int], ...]
    """Offset and size of damaged or missing bytes."""
    samples: tuple[str, ...]
    """Samples whose complete records were removed, because part of their history was lost."""
    cut_bytes: int
    """Size of the half-written tail, or of the end whose position cannot be determined."""

    @property
    def is_empty(self) -> bool:
        return not self.gaps and not self.cut_bytes

    def write(self, path: Path) -> None:
        """Replaces the ledger at `path` by the repaired one."""
        path.touch()
        with path.open("rb") as old, atomic_open(path) as new:
            for piece in self.pieces:
                if piece.replacement is not None:
                    new.write(piece.replacement)
                    continue
                old.seek(piece.start)
                remaining = piece.end - piece.start
                while remaining:
                    chunk = old.read(min(remaining, _COPY_BYTES))
                    new.write(chunk)
                    remaining -= len(chunk)


def repair_log(path: Path, checkpoint: CheckpointMark) -> RepairedLog:
    """The repair that makes the ledger at `path` consistent with the checkpoint position."""
    size = path.stat().st_size if path.exists() else 0
    if not size and not checkpoint.position:
        return RepairedLog((), (), (), 0)
    if not size:
        lost, _ = _with_tasks([_Piece(0, 0, gap(checkpoint.position))], checkpoint.in_flight)
        return RepairedLog(tuple(lost), ((0, checkpoint.position),), (), 0)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return _LogRepair(content, checkpoint).repair()


class _LogRepair:
    def __init__(self, content: mmap.mmap, checkpoint: CheckpointMark) -> None:
        self._content = content
        self._checkpoint = checkpoint
        self._line_runs = list(_line_runs(content))
        """Start, end, and whether complete: alternating runs of complete and damaged lines."""

    def repair(self) -> RepairedLog:
        size, position = len(self._content), self._checkpoint.position
        before = self._before_checkpoint()
        damaged = [(start, end) for start, end, whole in self._line_runs if not whole]
        torn = self._line_runs[-1][0] if not self._line_runs[-1][2] else size
        if before is None:
            # Nothing shows where the checkpoint was: records after the last damage before it have no known position.
            before = max((start for start, _ in damaged if start < position), default=size)
            while position - before < GAP_BYTES:
                before = self._line_before(before)
            checkpoint = _Piece(before, before, gap(position - before))
            head, tail, cut = [*self._pieces_in(0, before), checkpoint], [], size - before
        else:
            after = max(min(torn, size), before)
            head, tail, cut = self._pieces_in(0, before), self._pieces_in(before, after), size - after
        gaps = [(piece.start, piece.size) for piece in (*head, *tail) if piece.replacement is not None]
        shift = position - sum(piece.size for piece in head)
        if shift:
            gaps.append((before, abs(shift)))
        samples: list[str] = []
        if shift or any(piece.replacement is not None for piece in head):
            head, samples = self._without_inconsistent(self._resized(head, position))
        pieces = (*_joined(head), *_joined(tail))  # a line that ends there marks the checkpoint's position
        return RepairedLog(pieces, tuple(gaps), tuple(samples), cut)

    def _before_checkpoint(self) -> int | None:
        """The checkpoint's position in the file as it is now; None if it cannot be determined."""
        position, mark, content = self._checkpoint.position, self._checkpoint.mark, self._content
        if position == 0:
            return 0
        inside = any(start < position <= end and not whole for start, end, whole in self._line_runs)
        ends = position <= len(content) and content[position - 1] == ord("\n")
        if ends and (self._mark_before(position) in (mark, GAP) or (mark is None and not inside)):
            return position
        if mark and (moved := self._nearest(mark)) is not None:
            return moved
        return position if inside else None

    def _nearest(self, mark: str) -> int | None:
        """The end of the record with that checksum that is nearest to the expected position."""
        found: list[int] = []
        start, prefix = 0, mark.encode() + b" "
        while (start := self._content.find(prefix, start)) >= 0:
            end = self._content.find(b"\n", start) + 1
            begins = start == 0 or self._content[start - 1] == ord("\n")
            if begins and end and is_whole(self._content[start : end - 1]):
                found.append(end)
            start += 1
        return min(found, key=lambda end: abs(end - self._checkpoint.position), default=None)

    def _mark_before(self, position: int) -> str:
        line = self._content[self._line_before(position) : position - 1]
        return GAP if is_gap(line) else line[: HEADER_BYTES - 1].decode("ascii", "replace")

    def _line_before(self, end: int) -> int:
        """The start of the line that ends at `end`."""
        return self._content.rfind(b"\n", 0, max(end - 1, 0)) + 1

    def _pieces_in(self, begin: int, end: int) -> list[_Piece]:
        """The pieces of a range: complete lines unchanged, gaps for damaged ones."""
        pieces: list[_Piece] = []
        for start, stop, whole in self._line_runs:
            start, stop = max(start, begin), min(stop, end)
            if start >= stop:
                continue
            if whole:
                pieces.append(_Piece(start, stop))
                continue
            need = stop - start
            while need < GAP_BYTES and pieces:  # too small for a gap: complete lines before it are removed too
                last = pieces.pop()
                split = self._line_before(last.end) if last.replacement is None else last.start
                need += last.end - max(split, last.start)
                if last.start < split:
                    pieces.append(_Piece(last.start, split))
                start = stop - need
            pieces.append(_Piece(start, stop, gap(max(need, GAP_BYTES))))
        return pieces

    def _resized(self, pieces: list[_Piece], position: int) -> list[_Piece]:
        """The pieces resized to `position` bytes in all: the last gap absorbs the difference; if it is too small for
        that, complete lines before it are removed."""
        size = sum(piece.size for piece in pieces)
        if size == position:
            return pieces
        at = next(
            (number for number in reversed(range(len(pieces))) if pieces[number].replacement is not None), len(pieces)
        )
        rest = pieces[at + 1 :]
        kept = pieces[:at]
        budget = position - sum(piece.size for piece in (*kept, *rest))
        while budget < GAP_BYTES and (budget or not rest):  # a gap at the end marks the checkpoint's position
            if not kept:  # nothing before the gap: remove lines after it
                first = rest.pop(0)
                split = first.end if first.replacement is not None else self._content.find(b"\n", first.start) + 1
                budget += first.size if first.replacement is not None else split - first.start
                if split < first.end:
                    rest.insert(0, _Piece(split, first.end))
                continue
            last = kept.pop()
            split = max(self._line_before(last.end), last.start) if last.replacement is None else last.start
            budget += last.size if last.replacement is not None else last.end - split
            if last.replacement is None and last.start < split:
                kept.append(_Piece(last.start, split))
        where = kept[-1].end if kept else 0
        return [*kept, *([_Piece(where, where, gap(budget))] if budget else []), *rest]

    def _without_inconsistent(self, pieces: list[_Piece]) -> tuple[list[_Piece], list[str]]:
        """The pieces without the records of samples whose history is inconsistent, and those samples. Samples that were
        in flight at the checkpoint get a record of their task inside a gap."""
        histories: dict[str, list[tuple[int, Transition]]] = {}
        for offset, line in self._lines(pieces):
            transition = Transition.decode(line)
            histories.setdefault(transition.sample, []).append((offset, transition))
        in_flight = self._checkpoint.in_flight
        broken = {sample for sample, records in histories.items() if not _is_consistent(records, sample in in_flight)}
        queued = {sample: task for sample, task in in_flight.items() if sample in broken or sample not in histories}
        ended = iter(sorted(histories.keys() - broken - in_flight.keys(), key=lambda sample: histories[sample][0][0]))
        while True:
            made, all_fit = _with_tasks(self._without(pieces, broken), queued)
            oldest = None if all_fit else next(ended, None)
            if oldest is None:
                return made, sorted(broken)
            broken.add(oldest)  # removed to make space; it ended before the checkpoint

    def _lines(self, pieces: list[_Piece]) -> Iterator[tuple[int, bytes]]:
        """The new offset of each record, and its line."""
        offset = 0
        for piece in pieces:
            if piece.replacement is None:
                for line in self._content[piece.start : piece.end].split(b"\n")[:-1]:
                    if not is_gap(line):
                        yield offset, line
                    offset += len(line) + 1
            else:
                offset += piece.size

    def _without(self, pieces: list[_Piece], samples: set[str]) -> list[_Piece]:
        if not samples:
            return pieces
        made: list[_Piece] = []
        for piece in pieces:
            if piece.replacement is not None:
                made.append(piece)
                continue
            start = piece.start
            for line in self._content[piece.start : piece.end].split(b"\n")[:-1]:
                end = start + len(line) + 1
                removed = not is_gap(line) and Transition.decode(line).sample in samples
                made.append(_Piece(start, end, gap(end - start) if removed else None))
                start = end
        return list(_joined(made))


def _line_runs(content: mmap.mmap) -> Iterator[tuple[int, int, bool]]:
    start = at = 0
    whole: bool | None = None
    before = b""
    while at < len(content):
        end = content.find(b"\n", at) + 1 or len(content)
        line = content[at:end]
        good = line.endswith(b"\n") and is_whole(line[:-1]) and line != before  # a line written twice counts as damaged
        if whole is not None and good != whole:
            yield start, at, whole
            start = at
        whole, at, before = good, end, line
    if whole is not None:
        yield start, at, whole


def _is_consistent(records: list[tuple[int, Transition]], in_flight: bool) -> bool:
    """Whether a sample's records are consistent: it has a task, ends at most once and finally, and is not open for
    ever."""
    steps = [step for step in history_of(records) if step.counts]
    if not steps:
        return True
    states = [step.transition.state for step in steps]
    if states[0] != "queued" or steps[0].task is None or ROLLED_BACK in states:
        return False
    if any(state in _ENDS for state in states[:-1]):
        return False
    return in_flight or states[-1] in (*_ENDS, "failed")


def _with_tasks(pieces: list[_Piece], tasks: Mapping[str, str]) -> tuple[list[_Piece], bool]:
    """The pieces with a `queued` record per sample, in gaps that are large enough, and whether all of them fit.

    If the last piece is a gap, a gap remains at its end: it marks the checkpoint's position.
    """
    made = []
    waiting = list(tasks.items())
    for number, piece in enumerate(pieces):
        if piece.replacement is None:
            made.append(piece)
            continue
        filled, budget, last = b"", piece.size, number == len(pieces) - 1
        while waiting and (record := _queued(*waiting[0], budget, last)) is not None:
            filled, budget = filled + record, budget - len(record)
            waiting.pop(0)
        made.append(_Piece(piece.start, piece.end, filled + (gap(budget) if budget else b"")))
    return made, not waiting


def _queued(sample: str, task: str, budget: int, last: bool) -> bytes | None:
    """A `queued` record for a sample and its task, sized so that the rest of the gap is empty or large enough for a
    gap."""
    record = Transition(sample, "queued", time_s=0.0, info={"task": task}).encode()
    if len(record) + GAP_BYTES <= budget or (len(record) == budget and not last):
        return record
    unpadded = Transition(sample, "queued", time_s=0.0, info={"task": task, "lost": ""}).encode()
    if len(unpadded) > budget or last:
        return None
    return Transition(sample, "queued", time_s=0.0, info={"task": task, "lost": " " * (budget - len(unpadded))}).encode()


def _joined(pieces: list[_Piece]) -> Iterator[_Piece]:
    """The pieces, with adjacent pieces of the old file joined, and adjacent gaps too."""
    last: _Piece | None = None
    for piece in pieces:
        if last is not None and last.replacement is None and piece.replacement is None and last.end == piece.start:
            last = _Piece(last.start, piece.end)
            continue
        if (
            last is not None
            and last.replacement
            and piece.replacement
            and is_gap(last.replacement)
            and is_gap(piece.replacement)
        ):
            last = _Piece(last.start, piece.end, gap(last.size + piece.size))
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last
