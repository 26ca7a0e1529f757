"""The trace: what every sample did at every moment of a run, for a timeline viewer.

The file is a JSON array of events in the Trace Event Format, one per line, that Perfetto and chrome://tracing open. A
killed run leaves the array without its end, which both accept.

Invariants:

- Every stay of a sample in a state is one event, written when it ends; stays still open when the trace is closed are
  marked `unfinished`. Each begins where the sample's last one ended.
- Events on a lane do not overlap. A sample that enters a row takes its lowest free lane and keeps it until it leaves the
  row, so the height of a row shows how busy it was.
- Only unfinished samples and the latest transitions are in memory. A file that would exceed its limit ends, and the next
  file continues: a stay is in the file in which it ended, and rows and lanes keep their numbers. If there is no next
  file, the last event says that the limit was reached.

Rows and lanes, by example:

    waiting    lane 0   |a queued|
               lane 1   |b queued     |
    engine 0   lane 0            |a generating  |c generating …
               lane 1                 |b generating …
    graders    lane 0                           |a scoring|
    buffer     lane 0                                     |a scored …

Workers report in batches, so transitions of different samples arrive out of order. Lanes are assigned in the order of
time: a transition is kept until about a thousand others have arrived after it, or until the trace is flushed. A
transition that arrives even later gets a lane that was free at its own time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from json.encoder import encode_basestring_ascii as quote
from math import isfinite
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Any

from roll.atomic_files import to_json
from roll.config.errors import RunError
from roll.config.file_modes import inherit_folder_mode
from roll.ledger.log import Transition
from roll.run.folder import RunFolder
from roll.run.state_latency import ENDS

MAX_BYTES = 512 * 2**20
_BUFFER_BYTES = 1 << 16
_RESERVED_BYTES = 512
"""For the end of a file: the event that says it is full, and the end of the array."""
_PENDING = 2048
_FIRST_LANE = 10_001
"""Perfetto identifies threads by their number alone and takes the thread with its process's number for the main thread.
So lanes are numbered across all rows, with numbers that no row has."""

_ROWS = {"queued": "waiting", "scoring": "graders", "scored": "buffer", "kept": "buffer"}
_ON_ENGINES = frozenset({"generating", "paused", "acting"})
_ROW_ORDER = {"controller": 0, "waiting": 1, "graders": 1_000_000, "buffer": 1_000_001}
"""Vertical order of the rows: that of a sample's lifecycle, with the engines in the middle."""

_by_time = itemgetter(0)


class Trace:
    """Writes the trace of one process. Writes are buffered; the caller flushes at the end of each step."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES, next_path: Callable[[], Path] | None = None) -> None:
        """Creates the file, which must not exist. `next_path` names the file that continues a full one."""
        assert max_bytes >= 4096, "a trace needs room for the names of its rows"
        self._next_path = next_path
        self.full = False
        """Whether the limit is reached."""
        self._max_bytes = max_bytes
        self._begin(path)
        self._writing = True
        """False once the trace is full, closed or broken; events added later are ignored."""
        self._buffer: list[str] = []
        self._buffered = 0
        self._pending: list[tuple[int, Transition]] = []
        self._moved_us: dict[str, int] = {}
        """Time of the last transition of each unfinished sample, including pending ones."""
        self._open: dict[str, _StateSpan] = {}
        self._newest_us = 0
        self._lanes = count(_FIRST_LANE)
        self._rows: dict[str, _Row] = {}
        self._controller = self._row("controller")
        self._label_controller()

    @classmethod
    def open(cls, folder: RunFolder, max_bytes: int = MAX_BYTES, keep_bytes: int = 0) -> Trace:
        """A new trace of the run: `trace.json`, or `trace-2.json` … after existing ones, in files of at most `max_bytes`.
        Only the newest files with at most `keep_bytes` in all are kept; 0 keeps all."""

        def next_path() -> Path:
            if keep_bytes:
                drop_traces(folder, keep_bytes - max_bytes)
            number = max((_number(path) for path in trace_files(folder)), default=0) + 1
            return folder.path / (f"trace-{number}.json" if number > 1 else "trace.json")

        return cls(next_path(), max_bytes, next_path)

    def _begin(self, path: Path) -> None:
        self.path = path
        self._remaining_bytes = self._max_bytes - _RESERVED_BYTES
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        inherit_folder_mode(path)
        self._separator = "[\n"
        self._labelled: set[int] = set()
        """Rows and lanes whose names are in this file."""

    def append(self, transition: Transition) -> None:
        """Adds a transition. Those of one sample arrive in order; if the nodes' clocks disagree, it takes no time."""
        if not self._writing:
            return
        time_us = round(transition.time_s * 1e6)
        moved_us = self._moved_us.get(transition.sample, time_us)
        if time_us < moved_us:
            time_us = moved_us
        self._moved_us[transition.sample] = time_us
        self._pending.append((time_us, transition))
        if len(self._pending) >= _PENDING:
            self._emit_pending(_PENDING // 2)

    def span(self, name: str, row: str, start_s: float, end_s: float, **args: Any) -> None:
        """Adds a span that does not belong to a sample; `row` names its owner, such as the controller."""
        start_us, end_us = round(start_s * 1e6), round(end_s * 1e6)
        self._newest_us = max(self._newest_us, end_us)
        owner = self._row(row)
        lane = self._lane(owner, start_us)
        self._write(
            f'{{"name":{quote(name)},"cat":"run","ph":"X","ts":{start_us},"dur":{end_us - start_us},'
            f'"pid":{owner.pid},"tid":{lane},"args":{to_json(args)}}}',
            owner,
            lane,
        )
        owner.release(lane, end_us)

    def counter(self, name: str, time_s: float, value: float) -> None:
        """Adds a point to a curve, such as the depth of a queue."""
        time_us = round(time_s * 1e6)
        self._newest_us = max(self._newest_us, time_us)
        self._write(
            f'{{"name":{quote(name)},"ph":"C","ts":{time_us},"pid":{self._controller.pid},'
            f'"args":{{"value":{to_json(value)}}}}}',
            self._controller,
        )

    def flush(self) -> None:
        """Writes every stay that has ended, so that it survives this process."""
        self._emit_pending(len(self._pending))
        self._drain()

    def close(self) -> None:
        """Writes the rest, including open stays, and ends the array."""
        if self._descriptor < 0:
            return
        self._emit_pending(len(self._pending))
        for span in self._open.values():
            self._write(span.event(self._newest_us, ',"unfinished":true'), span.row, span.lane)
        self._drain(end="\n]\n")
        self._stop()

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _emit_pending(self, number: int) -> None:
        """Turns the earliest pending transitions into events."""
        self._pending.sort(key=_by_time)
        earliest, self._pending = self._pending[:number], self._pending[number:]
        for time_us, transition in earliest:
            self._move(time_us, transition)
        if self.full:
            self._clear_open()

    def _move(self, now_us: int, transition: Transition) -> None:
        state = transition.state
        details = _details_of(transition)
        span = self._open.get(transition.sample)
        if now_us > self._newest_us:
            self._newest_us = now_us
        if span is not None:
            self._write(span.event(now_us, f',"then":{{"state":{quote(state)}{details}}}'), span.row, span.lane)
        if state in ENDS:
            self._end(now_us, transition, details)
            return
        row = self._row_of(transition, span)
        if span is None:
            span = self._open[transition.sample] = _StateSpan(row, self._lane(row, now_us), _identity_of(transition))
        elif row is not span.row:
            span.row.release(span.lane, now_us)
            span.row, span.lane = row, self._lane(row, now_us)
        span.state, span.since_us, span.details = state, now_us, details

    def _end(self, now_us: int, transition: Transition, details: str) -> None:
        """Removes a sample. A final state other than `trained` is marked where it happened."""
        span = self._open.pop(transition.sample, None)
        self._moved_us.pop(transition.sample, None)
        if span is not None:
            span.row.release(span.lane, now_us)
        if transition.state != "trained":
            row = self._row("waiting") if span is None else span.row
            where = f'"pid":{row.pid},"s":"p"' if span is None else f'{span.where},"s":"t"'
            identity = _identity_of(transition) if span is None else span.identity
            self._write(
                f'{{"name":{quote(transition.state)},"cat":"sample","ph":"i","ts":{now_us},{where},'
                f'"args":{{{identity}{details}}}}}',
                row,
                None if span is None else span.lane,
            )

    def _row_of(self, transition: Transition, span: _StateSpan | None) -> _Row:
        """The row of a state. `generating` names the engine; a sample that then pauses or acts stays in that row."""
        if transition.state not in _ON_ENGINES:
            return self._row(_ROWS.get(transition.state, "other"))
        engine = transition.info.get("engine")
        if engine is not None:
            return self._row(f"engine {engine}")
        if span is not None and span.state in _ON_ENGINES:
            return span.row
        return self._row("environments" if transition.state == "acting" else "engines")

    def _row(self, name: str) -> _Row:
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = _Row(len(self._rows) + 1, name)
        return row

    def _lane(self, row: _Row, start_us: int) -> int:
        lane = row.acquire(start_us)
        if lane is None:
            lane = next(self._lanes)
            row.lane_positions[lane] = len(row.lane_positions)
        return lane

    def _write(self, event: str, row: _Row, lane: int | None = None) -> None:
        """Buffers an event, preceded by the names of its row and lane if this file does not have them yet. If it does not
        fit, it begins the next file or is replaced by the event that says the trace is full."""
        if not self._writing:
            return
        size = len(event) + 2  # characters are bytes: events are ASCII
        if row.pid in self._labelled and (lane is None or lane in self._labelled) and size <= self._remaining_bytes:
            self._buffer_events([event], size)
            return
        events = [*self._labels(row, lane), event]
        size = _size_of(events)
        if size > self._remaining_bytes and self._next_path is not None:
            self._continue()
            events = [*self._labels(row, lane), event]
            size = _size_of(events)
            if size > self._remaining_bytes:  # longer than a whole file
                return
        if size > self._remaining_bytes:
            self.full, self._writing = True, False
            events = [
                f'{{"name":"the trace ends here: it has reached its limit of {self._max_bytes} bytes",'
                f'"ph":"i","s":"g","ts":{self._newest_us},"pid":{self._controller.pid}}}'
            ]
            size = _size_of(events)
        self._labelled |= {row.pid, lane or row.pid}
        self._buffer_events(events, size)

    def _buffer_events(self, events: list[str], size: int) -> None:
        self._remaining_bytes -= size
        self._buffer += events
        self._buffered += size
        if self._buffered >= _BUFFER_BYTES:
            self._drain()

    def _labels(self, row: _Row, lane: int | None) -> Iterator[str]:
        if row.pid not in self._labelled:
            yield from _label("process", row.name, _row_position(row.name), f'"pid":{row.pid}')
        if lane is not None and lane not in self._labelled:
            position = row.lane_positions[lane]
            yield from _label("thread", f"lane {position}", position, f'"pid":{row.pid},"tid":{lane}')

    def _continue(self) -> None:
        """Ends the file and begins the next."""
        assert self._next_path is not None
        self._drain(end="\n]\n")
        os.close(self._descriptor)
        self._descriptor = -1
        try:
            self._begin(self._next_path())
        except OSError as error:
            self._stop()
            raise RunError(f"cannot write to {self.path}: {error.strerror}") from error
        self._label_controller()

    def _label_controller(self) -> None:
        labels = list(self._labels(self._controller, None))
        self._labelled.add(self._controller.pid)
        self._buffer_events(labels, _size_of(labels))

    def _drain(self, end: str = "") -> None:
        text = end
        if self._buffer:
            text = self._separator + ",\n".join(self._buffer) + end
            self._separator = ",\n"
        self._buffer.clear()
        self._buffered = 0
        rest = memoryview(text.encode("ascii"))
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            self._stop()
            raise RunError(f"cannot write to {self.path}: {error.strerror}") from error

    def _stop(self) -> None:
        self._writing = False
        self._clear_open()
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _clear_open(self) -> None:
        self._pending.clear()
        self._moved_us.clear()
        self._open.clear()


def _size_of(events: Sequence[str]) -> int:
    """Bytes of events with their separators."""
    return sum(map(len, events)) + 2 * len(events)


def trace_files(folder: RunFolder) -> list[Path]:
    """A run's traces, oldest first."""
    return sorted((path for path in folder.path.glob("trace*.json") if _number(path)), key=_number)


def drop_traces(folder: RunFolder, keep_bytes: int) -> None:
    """Deletes the oldest traces until the others have at most `keep_bytes`; the newest is always kept."""
    files = trace_files(folder)
    size = sum(path.stat().st_size for path in files)
    for path in files[:-1]:
        if size <= keep_bytes:
            return
        size -= path.stat().st_size
        path.unlink()


def _number(path: Path) -> int:
    """The number of a run's trace file, from 1; 0 if it is not one."""
    match = re.fullmatch(r"trace(?:-(\d+))?\.json", path.name)
    return 0 if match is None else int(match[1] or 1)


class _Row:
    """A row of the display, a process in the format: its lanes, and the free ones with the time since when."""

    __slots__ = ("_free", "_since_us", "lane_positions", "name", "pid")

    def __init__(self, pid: int, name: str) -> None:
        self.pid = pid
        self.name = name
        self.lane_positions: dict[int, int] = {}
        """Position of each lane, counted from the top of the row."""
        self._free: list[int] = []
        self._since_us: dict[int, int] = {}

    def acquire(self, start_us: int) -> int | None:
        """The lowest lane that is free from `start_us` on, if there is one."""
        free, since_us = self._free, self._since_us
        if free and since_us[free[0]] <= start_us:
            return heappop(free)
        found = min((lane for lane in free if since_us[lane] <= start_us), default=None)
        if found is not None:
            free.remove(found)
            heapify(free)
        return found

    def release(self, lane: int, end_us: int) -> None:
        self._since_us[lane] = end_us
        heappush(self._free, lane)


class _StateSpan:
    """An unfinished sample's current stay: parts of its event, ready to be joined."""

    __slots__ = ("details", "identity", "lane", "row", "since_us", "state")

    def __init__(self, row: _Row, lane: int, identity: str) -> None:
        self.row = row
        self.lane = lane
        self.identity = identity
        self.state = ""
        self.since_us = 0
        self.details = ""

    @property
    def where(self) -> str:
        return f'"pid":{self.row.pid},"tid":{self.lane}'

    def event(self, end_us: int, ending: str) -> str:
        return (
            f'{{"name":{quote(self.state)},"cat":"sample","ph":"X","ts":{self.since_us},"dur":{end_us - self.since_us},'
            f'"pid":{self.row.pid},"tid":{self.lane},"args":{{{self.identity}{self.details}{ending}}}}}'
        )


def _identity_of(transition: Transition) -> str:
    """The arguments at the beginning of every event of a sample."""
    task = transition.info.get("task")
    return f'"sample":{quote(transition.sample)}' + ("" if task is None else f',"task":{quote(str(task))}')


def _details_of(transition: Transition) -> str:
    """A transition's other fields, without sample, task and state, as arguments that follow others."""
    details = f',"reason":{quote(transition.reason)}' if transition.reason else ""
    for key, value in transition.info.items():
        if key != "task":
            details += f",{quote(key)}:{_json(value)}"
    return details


def _label(kind: str, name: str, position: int, where: str) -> Iterator[str]:
    yield f'{{"name":"{kind}_name","ph":"M",{where},"args":{{"name":{quote(name)}}}}}'
    yield f'{{"name":"{kind}_sort_index","ph":"M",{where},"args":{{"sort_index":{position}}}}}'


def _json(value: Any) -> str:
    """Same as `to_json`, but several times faster for the usual values of transitions."""
    kind = type(value)
    if kind is int or (kind is float and isfinite(value)):
        return repr(value)
    return quote(value) if kind is str else to_json(value)


def _row_position(row: str) -> int:
    kind, _, number = row.partition(" ")
    return 10 + int(number) if kind == "engine" and number.isdecimal() else _ROW_ORDER.get(row, 9)
