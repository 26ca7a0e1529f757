"""Writes ledger records into the tables of the index: one row per sample.

A row describes what counts in the lineage of the final weights; transitions that were rolled back do not count in it. The
seconds in states and the counts of reasons do include them, because they happened.
"""

from __future__ import annotations

import json
import re
import sqlite3
import struct
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from roll.config.errors import RunError
from roll.ledger.histogram import buckets
from roll.ledger.log import HEADER_BYTES, ROLLED_BACK
from roll.ledger.sample_history import HistoryEntry, group_of, history_of, read_records

_ENDS = ("trained", "dropped")
_COLUMNS = "grp, sample, task, state, reason, reward, scored_s, ends, first_s, last_s, offsets"

_TEXT = r'"([^"\\]*+(?:\\.[^"\\]*+)*+)"'
_RECORD = re.compile(
    rf'^.{{{HEADER_BYTES}}}\{{"sample":{_TEXT},"state":{_TEXT}(?:,"reason":{_TEXT})?,"time_s":([^,}}]*+)'
    rf'(?:,"info":(\{{(?:"task":{_TEXT}|"reward":(-?[\d.e+-]+)(?=[,}}]))?.*))?\}}$',
    re.MULTILINE,
)
"""Matches a record's sample, state, reason, time and info, and the task or the reward if the info begins with it."""
_RecordFields = tuple[str, str, str, str, str, str, str]


@dataclass(slots=True)
class IndexRow:
    """A sample's row. `last_s` is when it entered its state; None if a rollback returned it to that state."""

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

    def from_history(self, steps: list[HistoryEntry]) -> IndexRow:
        """The row rebuilt from the sample's whole history."""
        row = IndexRow(self.grp, self.sample, last_s=self.last_s, offsets=self.offsets)
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


class RecordBlock:
    """A block of records to be written into the tables."""

    def __init__(self, database: sqlite3.Connection, record: Path) -> None:
        self._database = database
        self._record = record
        self._attempts: set[tuple[str, str]] = set()
        self._reasons: Counter[tuple[str, str]] = Counter()
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)

    def apply(self, start: int, lines: list[bytes]) -> None:
        """Applies these records to the rows of their samples; the first record begins at byte `start`."""
        found = _RECORD.findall(b"\n".join(lines).decode("ascii"))
        if len(found) != len(lines):
            raise RunError(f"{self._record} has a record after byte {start} that is not a transition")
        by_sample: defaultdict[str, list[_RecordFields]] = defaultdict(list)
        offsets: defaultdict[str, list[int]] = defaultdict(list)
        for offset, record in zip(accumulate([len(line) + 1 for line in lines], initial=start), found, strict=False):
            by_sample[record[0]].append(record)
            offsets[record[0]].append(offset)
        rows = self._load(list(by_sample))
        rolled_back = []
        for written, row in zip(by_sample, rows, strict=True):
            row.offsets += struct.pack(f"<{len(offsets[written])}q", *offsets[written])
            if self._apply_to_row(row, by_sample[written]):
                rolled_back.append(row.sample)
        self._store(self._rebuilt(rows, rolled_back))

    def _load(self, written: list[str]) -> list[IndexRow]:
        """The samples' rows; new ones for samples that have none."""
        samples = list(map(_decode_string, written))
        keys = list(zip(map(group_of, samples), samples, strict=True))
        self._database.execute("CREATE TEMP TABLE IF NOT EXISTS wanted (grp, sample)")
        self._database.execute("DELETE FROM wanted")
        self._database.executemany("INSERT INTO wanted VALUES (?, ?)", keys)
        sql = f"SELECT {_COLUMNS} FROM wanted CROSS JOIN samples USING (grp, sample)"
        known = {row[1]: IndexRow(*row) for row in self._database.execute(sql)}
        return [known.get(key[1]) or IndexRow(*key) for key in keys]

    def _apply_to_row(self, row: IndexRow, records: list[_RecordFields]) -> bool:
        """Applies a sample's records in order. Returns whether one is a rollback: then its whole history must be read."""
        rolled_back = False
        state, last_s = row.state or "", row.last_s
        for _, written, reason, seconds, info, task, reward in records:
            previous_state, state = state, _decode_string(written) if "\\" in written else written
            if state == ROLLED_BACK:
                rolled_back, last_s = True, None
                continue
            time_s = float(seconds) if seconds != "null" else None
            if last_s is not None and time_s is not None:
                self._seconds[previous_state].append(time_s - last_s)
            last_s = time_s
            if row.state is None:
                row.state, row.first_s = state, time_s
            if reason:
                self._reasons[state, reason_class(_decode_string(reason))] += 1
            if state == "queued":
                self._queue(row, task, info)
            elif state == "scored":
                row.reward, row.scored_s = float(reward) if reward else _number(_info_value(info, "reward")), time_s
            elif state in _ENDS:
                row.ends += 1
        row.state, row.reason, row.last_s = state, _decode_string(reason), last_s
        return rolled_back

    def _queue(self, row: IndexRow, written: str, info: str) -> None:
        task = _decode_string(written) if written else _info_value(info, "task")
        if task is not None:
            row.task = str(task)
            self._attempts.add((row.task, row.grp))

    def _rebuilt(self, rows: list[IndexRow], rolled_back: list[str]) -> list[IndexRow]:
        if not rolled_back:
            return rows
        to_rebuild = set(rolled_back)
        with self._record.open("rb") as file:
            return [
                row.from_history(history_of(read_records(file, self._record, row.offsets)))
                if row.sample in to_rebuild
                else row
                for row in rows
            ]

    def _store(self, rows: list[IndexRow]) -> None:
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
            [(state, *bucket) for state, values in self._seconds.items() for bucket in buckets(values)],
        )


def reason_class(reason: str) -> str:
    """A reason without its variable part: the text before the colon."""
    return reason.partition(":")[0].strip()


def _decode_string(text: str) -> str:
    """Decodes a JSON string given without its quotes."""
    # Half of a surrogate pair, which SQLite cannot store, becomes a question mark.
    return json.loads(f'"{text}"').encode("utf-8", "replace").decode() if "\\" in text else text


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _info_value(info: str, key: str) -> Any:
    return json.loads(info).get(key) if info else None
