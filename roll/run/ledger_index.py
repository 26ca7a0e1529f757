"""The index of a ledger: a SQLite file beside the record that answers questions without reading all of it.

What always holds:

- The record is the truth. The index has read the first part of it, up to a byte it remembers, and only whole records;
  asking brings it up to date. A record that is shorter or different before that byte makes it begin anew, and so does a
  missing, damaged or older index. In a folder that cannot be written it lives for one asking, in a temporary file.
- It may be asked while the run is writing and by many processes: each block of records is one transaction, begun at the
  byte that the last one reached.
- A sample's row says what counts in the lineage of the final weights. What was undone counts for nothing there; seconds
  in states and times of reasons happened all the same, and count.

One row is one sample: where it stands, and where its records begin in the ledger, from which its story is read. A sample
"17.3" is of the group "17".
"""

from __future__ import annotations

import difflib
import gc
import json
import math
import os
import re
import sqlite3
import struct
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from types import TracebackType
from typing import IO, Any
from zlib import crc32

from roll.config.errors import RunError, UserError
from roll.run.ledger import HEADER_BYTES, ROLLED_BACK, Transition, is_whole, record_blocks

VERSION = 1
BLOCK_BYTES = 8 * 2**20
PRECISION = 0.01
"""Quantiles of seconds are this near, relatively."""
_WAIT_S = 600.0
_CHECKED_BYTES = 4096
_LOG_WIDTH = 2 * math.log1p(PRECISION)
_NO_TIME = -(2**31)
_ENDS = ("trained", "dropped")
_LIFE = ("queued", "generating", "paused", "acting", "scoring", "scored", "kept", "trained", "dropped", "failed")

_TABLES = ("progress", "samples", "attempts", "reasons", "stages")
_SCHEMA = """
CREATE TABLE progress (position INTEGER, fingerprint INTEGER);
INSERT INTO progress VALUES (0, 0);
CREATE TABLE samples (
    grp TEXT, sample TEXT, task TEXT, state TEXT, reason TEXT, reward REAL, scored_s REAL, ends INTEGER, first_s REAL,
    last_s REAL, offsets BLOB, PRIMARY KEY (grp, sample)
) WITHOUT ROWID;
CREATE TABLE attempts (task TEXT, grp TEXT, PRIMARY KEY (task, grp)) WITHOUT ROWID;
CREATE TABLE reasons (state TEXT, class TEXT, times INTEGER, PRIMARY KEY (state, class)) WITHOUT ROWID;
CREATE TABLE stages (
    state TEXT, bucket INTEGER, times INTEGER, total_s REAL, longest_s REAL, PRIMARY KEY (state, bucket)
) WITHOUT ROWID;
"""
_COLUMNS = "grp, sample, task, state, reason, reward, scored_s, ends, first_s, last_s, offsets"

_TEXT = r'"([^"\\]*+(?:\\.[^"\\]*+)*+)"'
_RECORD = re.compile(
    rf'^.{{{HEADER_BYTES}}}\{{"sample":{_TEXT},"state":{_TEXT}(?:,"reason":{_TEXT})?,"time_s":([^,}}]*+)'
    rf'(?:,"info":(\{{(?:"task":{_TEXT}|"reward":(-?[\d.e+-]+)(?=[,}}]))?.*))?\}}$',
    re.MULTILINE,
)
"""Finds a record's sample, state, reason, time, info, and of the info the task or the reward that it begins with."""
Progress = Callable[[int, int], None]
_Found = tuple[str, str, str, str, str, str, str]


@dataclass(frozen=True, slots=True)
class Step:
    """A transition of a sample's story: for which task, and whether it counts in the lineage of the final weights."""

    transition: Transition
    task: str | None
    counts: bool


@dataclass(frozen=True)
class Attempt:
    """A sample's story, in the order of the record, and where it stands in the lineage: None if all of it was undone."""

    group: str
    sample: str
    steps: tuple[Step, ...]
    state: str | None
    reason: str
    reward: float | None


@dataclass(frozen=True)
class Ends:
    """How many groups, or tasks, have a sample that goes on; else one that was trained; else dropped; else failed."""

    trained: int
    dropped: int
    failed: int
    open: int


@dataclass(frozen=True)
class Problem:
    """A sample whose record breaks a promise: every sample is trained, or dropped for a reason, once, for a task."""

    sample: str
    what: str


@dataclass(frozen=True)
class Balance:
    groups: Ends
    tasks: Ends
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class ReasonCount:
    """Why samples left their way: how many stand so in the lineage, of how many tasks, and how often it is on record."""

    state: str
    reason: str
    samples: int
    tasks: int
    times: int
    example: str


@dataclass(frozen=True)
class Stage:
    """Seconds that samples were in a state until they left it."""

    state: str
    times: int
    mean_s: float
    p50_s: float
    p99_s: float
    max_s: float
    total_s: float


@dataclass(frozen=True)
class SolveRate:
    """A task's rewards: over scored samples, in `visits` groups that have one, the last scored at `last_visit_s`."""

    task: str
    solve_rate: float
    samples: int
    visits: int
    last_visit_s: float


class LedgerIndex:
    """Answers questions about the ledger as it was when the index was opened."""

    def __init__(self, record: Path, database: sqlite3.Connection) -> None:
        self.record = record
        self._database = database
        self._database.execute(f"PRAGMA cache_size=-{64 * 1024}")

    @classmethod
    def open(cls, record: Path, progress: Progress | None = None) -> LedgerIndex:
        """The index of the ledger at `record`, brought up to date; `progress` is told the bytes read, and of how many."""
        if not record.exists():
            raise UserError(f"{record} does not exist: write the folder of a run that has a ledger")
        try:
            return cls._updated_anyhow(record, progress)
        except sqlite3.Error as error:
            raise RunError(f"cannot make an index of {record}: {error}") from error

    @classmethod
    def _updated_anyhow(cls, record: Path, progress: Progress | None) -> LedgerIndex:
        """In the file beside the record, made anew if it is damaged; in a temporary one where there can be none."""
        path = index_path(record)
        try:
            return cls._updated(record, path, progress)
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise UserError(f"{path} is being brought up to date by another process: ask again later") from error
            return cls._updated(record, None, progress)
        except sqlite3.DatabaseError:
            for name in (path.name, f"{path.name}-journal"):
                path.with_name(name).unlink(missing_ok=True)
            return cls._updated(record, path, progress)

    @classmethod
    def _updated(cls, record: Path, path: Path | None, progress: Progress | None) -> LedgerIndex:
        # An empty name is a temporary file of SQLite's, which is gone when it is closed.
        database = sqlite3.connect(str(path) if path else "", timeout=_WAIT_S, isolation_level=None)
        try:
            index = cls(record, database)
            index._update(progress)
            database.execute("BEGIN")
        except BaseException:
            database.close()
            raise
        return index

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> LedgerIndex:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _update(self, progress: Progress | None) -> None:
        end = self.record.stat().st_size
        last = 0
        while (position := self._take_block(end)) != last:
            if progress is not None:
                progress(position, end)
            last = position

    def _take_block(self, end: int) -> int:
        """Read the next records of the ledger, if any, in one transaction; how far the index has come."""
        with self._changing(), _without_collector():
            position = self._trusted_position()
            for start, lines in record_blocks(self.record, position, end, BLOCK_BYTES):
                position = start + sum(map(len, lines)) + len(lines)
                _Block(self._database, self.record).take(start, lines)
                fingerprint = _fingerprint(self.record, position)
                self._database.execute("UPDATE progress SET position = ?, fingerprint = ?", (position, fingerprint))
                break
            return position

    @contextmanager
    def _changing(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._database.in_transaction:  # some errors have ended it already
                self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    def _trusted_position(self) -> int:
        """Where to read on; 0, with nothing in the tables, if what was read is not this record's beginning."""
        if self._database.execute("PRAGMA user_version").fetchone() == (VERSION,):
            position, fingerprint = self._database.execute("SELECT position, fingerprint FROM progress").fetchone()
            if fingerprint == _fingerprint(self.record, position):
                return int(position)
        for table in _TABLES:
            self._database.execute(f"DROP TABLE IF EXISTS {table}")
        for statement in _SCHEMA.split(";"):
            self._database.execute(statement)
        self._database.execute(f"PRAGMA user_version = {VERSION}")
        return 0

    def _ask(self, question: str, *values: Any) -> list[tuple[Any, ...]]:
        try:
            return self._database.execute(question, values).fetchall()
        except sqlite3.DatabaseError as error:
            path = index_path(self.record)
            raise RunError(f"{path} cannot be read ({error}): delete it, it is made again from the ledger") from error

    def states(self) -> dict[str, int]:
        """How many samples stand in each state of the lineage."""
        counts = dict(self._ask("SELECT state, count(*) FROM samples WHERE state IS NOT NULL GROUP BY state"))
        return {state: counts[state] for state in sorted(counts, key=life_order)}

    def undone(self) -> int:
        """How many samples are on record but not in the lineage: all they did was undone, and not done again."""
        return int(self._ask("SELECT count(*) FROM samples WHERE state IS NULL")[0][0])

    def span(self) -> tuple[float, float]:
        """When the lineage's first sample began, and when a sample last moved."""
        first, last = self._ask("SELECT min(first_s), max(last_s) FROM samples")[0]
        return first or 0.0, last or 0.0

    def balance(self) -> Balance:
        """Whether every group ended or goes on, and nothing ended twice."""
        problems = self._ask(
            "SELECT sample, CASE WHEN ends > 1 THEN 'ended ' || ends || ' times' WHEN task IS NULL THEN 'is of no task' "
            "WHEN state IN ('dropped', 'failed') AND reason = '' THEN state || ' without a reason' END AS what "
            "FROM samples WHERE state IS NOT NULL AND what IS NOT NULL ORDER BY grp, sample"
        )
        return Balance(self._ends("grp"), self._ends("task"), tuple(Problem(*found) for found in problems))

    def _ends(self, key: str) -> Ends:
        counts = self._ask(
            "SELECT CASE WHEN goes_on THEN 'open' WHEN trained THEN 'trained' WHEN dropped THEN 'dropped' "
            "ELSE 'failed' END AS ended, count(*) FROM (SELECT max(state = 'trained') AS trained, "
            "max(state = 'dropped') AS dropped, max(state NOT IN ('trained', 'dropped', 'failed')) AS goes_on "
            f"FROM samples WHERE state IS NOT NULL AND {key} IS NOT NULL GROUP BY {key}) GROUP BY ended"
        )
        return Ends(**{"trained": 0, "dropped": 0, "failed": 0, "open": 0, **dict(counts)})

    def reasons(self) -> list[ReasonCount]:
        """Why samples were dropped, failed or queued again, the most samples first; reasons are one up to their colon."""
        standing = self._ask(
            "SELECT state, trim(substr(reason, 1, instr(reason || ':', ':') - 1)) AS class, count(*), "
            "count(DISTINCT task), min(reason) FROM samples WHERE state IS NOT NULL AND reason != '' "
            "GROUP BY state, class"
        )
        now = {(state, kind): rest for state, kind, *rest in standing}
        counts = []
        for state, kind, times in self._ask("SELECT state, class, times FROM reasons"):
            samples, tasks, example = now.get((state, kind), (0, 0, kind))
            counts.append(ReasonCount(state, kind, samples, tasks, times, example))
        return sorted(counts, key=lambda count: (-count.samples, -count.times, count.state, count.reason))

    def stages(self) -> list[Stage]:
        """Seconds in each state, in the order of a sample's life."""
        rows = self._ask("SELECT state, bucket, times, total_s, longest_s FROM stages ORDER BY state, bucket")
        stages = [_stage(state, list(buckets)) for state, buckets in groupby(rows, key=lambda row: row[0])]
        return sorted(stages, key=lambda stage: life_order(stage.state))

    def solve_rates(self) -> list[SolveRate]:
        """The mean reward of each task that has one, the hardest first."""
        rows = self._ask(
            "SELECT task, avg(reward) AS rate, count(*), count(DISTINCT grp), max(scored_s) FROM samples "
            "WHERE reward IS NOT NULL AND task IS NOT NULL GROUP BY task ORDER BY rate, task"
        )
        return [SolveRate(*row) for row in rows]

    def task(self, task: str) -> list[Attempt]:
        """What became of a task: every sample that was an attempt at it, in the order they began."""
        rows = self._ask("SELECT sample, offsets FROM samples JOIN attempts USING (grp) WHERE attempts.task = ?", task)
        if not rows:
            near = "SELECT DISTINCT task FROM attempts ORDER BY abs(length(task) - length(?)) LIMIT 5000"
            raise UserError(f"no sample of {self.record} is of a task {task!r}{self._suggestion(near, task)}")
        with self.record.open("rb") as file:
            stories = [
                _attempt(sample, _read(file, self.record, offsets), task) for sample, offsets in sorted(rows, key=_first)
            ]
        return [story for story in stories if story.steps]

    def sample(self, sample: str) -> Attempt:
        """A sample's whole story."""
        rows = self._ask("SELECT offsets FROM samples WHERE grp = ? AND sample = ?", group_of(sample), sample)
        if not rows:
            near = "SELECT sample FROM samples ORDER BY abs(length(sample) - length(?)) LIMIT 5000"
            raise UserError(f"{self.record} has no sample {sample!r}{self._suggestion(near, sample)}")
        with self.record.open("rb") as file:
            return _attempt(sample, _read(file, self.record, rows[0][0]))

    def _suggestion(self, question: str, wanted: str) -> str:
        known = [name for (name,) in self._ask(question, wanted)]
        matches = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
        return f"; did you mean {' or '.join(map(repr, matches))}?" if matches else ""


@dataclass(slots=True)
class _Row:
    """A sample as the table has it. `last_s` is when it entered its state; None where it was put back into it."""

    grp: str
    sample: str
    task: str | None = None
    state: str | None = None
    reason: str = ""
    reward: float | None = None
    scored_s: float | None = None
    ends: int = 0
    first_s: float | None = None
    last_s: float | None = None
    offsets: bytes = b""

    def of_story(self, steps: list[Step]) -> _Row:
        """The row with what counts of the sample's whole story."""
        row = _Row(self.grp, self.sample, last_s=self.last_s, offsets=self.offsets)
        for step in steps:
            if step.counts:
                transition = step.transition
                if row.state is None:
                    row.first_s = transition.time_s
                row.task, row.state, row.reason = step.task, transition.state, transition.reason
                row.ends += transition.state in _ENDS
                if transition.state == "scored":
                    row.reward, row.scored_s = _number(transition.info.get("reward")), transition.time_s
        return row


class _Block:
    """Records on their way into the tables."""

    def __init__(self, database: sqlite3.Connection, record: Path) -> None:
        self._database = database
        self._record = record
        self._attempts: set[tuple[str, str]] = set()
        self._reasons: Counter[tuple[str, str]] = Counter()
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)

    def take(self, start: int, lines: list[bytes]) -> None:
        """Follow every sample through these records, the first of which begins at byte `start`."""
        found = _RECORD.findall(b"\n".join(lines).decode("ascii"))
        if len(found) != len(lines):
            raise RunError(f"{self._record} has a record after byte {start} that is not a transition")
        by_sample: defaultdict[str, list[_Found]] = defaultdict(list)
        offsets: defaultdict[str, list[int]] = defaultdict(list)
        for offset, record in zip(accumulate([len(line) + 1 for line in lines], initial=start), found, strict=False):
            by_sample[record[0]].append(record)
            offsets[record[0]].append(offset)
        rows = self._load(list(by_sample))
        undone = []
        for written, row in zip(by_sample, rows, strict=True):
            row.offsets += struct.pack(f"<{len(offsets[written])}q", *offsets[written])
            if self._follow(row, by_sample[written]):
                undone.append(row.sample)
        self._store(self._relived(rows, undone))

    def _load(self, written: list[str]) -> list[_Row]:
        """The samples' rows, new ones for those that have none."""
        samples = list(map(_plain, written))
        keys = list(zip(map(group_of, samples), samples, strict=True))
        self._database.execute("CREATE TEMP TABLE IF NOT EXISTS wanted (grp, sample)")
        self._database.execute("DELETE FROM wanted")
        self._database.executemany("INSERT INTO wanted VALUES (?, ?)", keys)
        question = f"SELECT {_COLUMNS} FROM wanted CROSS JOIN samples USING (grp, sample)"
        known = {row[1]: _Row(*row) for row in self._database.execute(question)}
        return [known.get(key[1]) or _Row(*key) for key in keys]

    def _follow(self, row: _Row, records: list[_Found]) -> bool:
        """Move a sample on by its records, in their order; whether one undoes: then its whole story must be read."""
        undone = False
        state, last_s = row.state or "", row.last_s
        for _, written, reason, seconds, info, task, reward in records:
            left, state = state, _plain(written) if "\\" in written else written
            if state == ROLLED_BACK:
                undone, last_s = True, None
                continue
            time_s = float(seconds) if seconds != "null" else None
            if last_s is not None and time_s is not None:
                self._seconds[left].append(time_s - last_s)
            last_s = time_s
            if row.state is None:
                row.state, row.first_s = state, time_s
            if reason:
                self._reasons[state, reason_class(_plain(reason))] += 1
            if state == "queued":
                self._queue(row, task, info)
            elif state == "scored":
                row.reward, row.scored_s = float(reward) if reward else _number(_in(info, "reward")), time_s
            elif state in _ENDS:
                row.ends += 1
        row.state, row.reason, row.last_s = state, _plain(reason), last_s
        return undone

    def _queue(self, row: _Row, written: str, info: str) -> None:
        task = _plain(written) if written else _in(info, "task")
        if task is not None:
            row.task = str(task)
            self._attempts.add((row.task, row.grp))

    def _relived(self, rows: list[_Row], undone: list[str]) -> list[_Row]:
        if not undone:
            return rows
        again = set(undone)
        with self._record.open("rb") as file:
            return [
                row.of_story(_story(_read(file, self._record, row.offsets))) if row.sample in again else row
                for row in rows
            ]

    def _store(self, rows: list[_Row]) -> None:
        values = sorted(map(attrgetter(*_COLUMNS.split(", ")), rows), key=itemgetter(0, 1))
        self._database.executemany(f"INSERT OR REPLACE INTO samples VALUES ({','.join('?' * 11)})", values)
        self._database.executemany("INSERT OR IGNORE INTO attempts VALUES (?, ?)", sorted(self._attempts))
        self._database.executemany(
            "INSERT INTO reasons VALUES (?, ?, ?) "
            "ON CONFLICT (state, class) DO UPDATE SET times = times + excluded.times",
            [(*key, times) for key, times in self._reasons.items()],
        )
        self._database.executemany(
            "INSERT INTO stages VALUES (?, ?, ?, ?, ?) ON CONFLICT (state, bucket) DO UPDATE SET "
            "times = times + excluded.times, total_s = total_s + excluded.total_s, "
            "longest_s = max(longest_s, excluded.longest_s)",
            [(state, *bucket) for state, values in self._seconds.items() for bucket in _buckets(values)],
        )


@contextmanager
def _without_collector() -> Iterator[None]:
    """Without the cycle collector, which would look at every match of a block again and again: they make no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def index_path(record: Path) -> Path:
    """Where the index of a ledger lies."""
    return record.with_suffix(".sqlite")


def group_of(sample: str) -> str:
    """The group that a sample's name says."""
    return sample.rpartition(".")[0] or sample


def reason_class(reason: str) -> str:
    """A reason without its variable part."""
    return reason.partition(":")[0].strip()


def life_order(state: str) -> tuple[int, str]:
    """Sorts states as a sample goes through them."""
    return (_LIFE.index(state) if state in _LIFE else len(_LIFE)), state


def _plain(text: str) -> str:
    """A string of JSON, without its quotes, as what it means."""
    # Half of a surrogate pair, which SQLite cannot hold, becomes a question mark.
    return json.loads(f'"{text}"').encode("utf-8", "replace").decode() if "\\" in text else text


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _in(info: str, key: str) -> Any:
    return json.loads(info).get(key) if info else None


def _first(row: tuple[str, bytes]) -> int:
    """Where a sample's first record begins."""
    return int.from_bytes(row[1][:8], "little")


def _fingerprint(record: Path, position: int) -> int:
    """A checksum of the beginning and the end of a record's first `position` bytes; -1 if it is shorter."""
    with record.open("rb") as file:
        if os.fstat(file.fileno()).st_size < position:
            return -1
        head = file.read(min(_CHECKED_BYTES, position))
        file.seek(max(0, position - _CHECKED_BYTES))
        return crc32(file.read(min(_CHECKED_BYTES, position)), crc32(head))


def _read(file: IO[bytes], record: Path, offsets: bytes) -> list[tuple[int, Transition]]:
    """The records that begin at the offsets."""
    found = []
    for (offset,) in struct.iter_unpack("<q", offsets):
        file.seek(offset)
        line = file.readline()[:-1]
        if not is_whole(line):
            raise RunError(f"{record} was changed while it was read: ask again")
        found.append((offset, _decode(line)))
    return found


def _decode(line: bytes) -> Transition:
    fields = json.loads(line[HEADER_BYTES:])
    if b"\\ud" in line:
        fields = json.loads(json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace"))
    return Transition(**fields)


def _story(records: list[tuple[int, Transition]]) -> list[Step]:
    """A sample's records with what counts of them.

    Each transition follows the one that was current; going back makes current what was so at that position. What counts
    is the last current one and all that it follows.
    """
    offsets = [offset for offset, _ in records]
    current = -1
    follows: list[int] = []
    currents = [current]
    tasks: list[str | None] = []
    for number, (_, transition) in enumerate(records):
        follows.append(current)
        task = transition.info.get("task") if transition.state == "queued" else None
        tasks.append(str(task) if task is not None else tasks[current] if current >= 0 else None)
        undoes = transition.state == ROLLED_BACK
        current = currents[bisect_left(offsets, transition.info["position"])] if undoes else number
        currents.append(current)
    counting = set()
    while current >= 0:
        counting.add(current)
        current = follows[current]
    return [Step(transition, tasks[number], number in counting) for number, (_, transition) in enumerate(records)]


def _attempt(sample: str, records: list[tuple[int, Transition]], task: str | None = None) -> Attempt:
    """A sample's story, or the part of it that is of the task."""
    steps = [step for step in _story(records) if task is None or step.task == task]
    row = _Row(group_of(sample), sample).of_story(steps)
    return Attempt(row.grp, sample, tuple(steps), row.state, row.reason, row.reward)


def _buckets(values: list[float]) -> Iterator[tuple[int, int, float, float]]:
    """Seconds by their logarithm: the bucket, how many are in it, their sum and the longest."""
    import numpy as np

    seconds = np.maximum(np.array(values), 0.0)
    buckets = np.full(len(seconds), _NO_TIME)
    timed = seconds > 0
    buckets[timed] = np.rint(np.log(seconds[timed]) / _LOG_WIDTH)
    found, which = np.unique(buckets, return_inverse=True)
    longest = np.zeros(len(found))
    np.maximum.at(longest, which, seconds)
    columns = (found, np.bincount(which), np.bincount(which, seconds), longest)
    return zip(*(column.tolist() for column in columns), strict=True)


def _stage(state: str, buckets: list[tuple[Any, ...]]) -> Stage:
    """From rows of (state, bucket, times, total_s, longest_s) in the buckets' order."""
    times = sum(row[2] for row in buckets)
    total_s, max_s = sum(row[3] for row in buckets), max(row[4] for row in buckets)

    def quantile(part: float) -> float:
        rank = math.ceil(part * times)
        bucket = next(
            row[1] for row, seen in zip(buckets, accumulate(row[2] for row in buckets), strict=True) if seen >= rank
        )
        return 0.0 if bucket == _NO_TIME else min(max_s, math.exp(bucket * _LOG_WIDTH))

    return Stage(state, times, total_s / times, quantile(0.5), quantile(0.99), max_s, total_s)
