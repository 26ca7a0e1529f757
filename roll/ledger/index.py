"""The index of a ledger: answers queries about it without reading all of it.

Opening it updates its tables (`index_tables`); answers describe that moment, whatever is written meanwhile. The tables
have one row per sample: its state in the lineage of the final weights, and the offsets of its records in the ledger, from
which its history is read.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any

from roll.config.errors import RunError, UserError
from roll.config.suggest import did_you_mean
from roll.ledger.histogram import quantile
from roll.ledger.index_rows import IndexRow
from roll.ledger.index_tables import Progress, index_path, open_updated
from roll.ledger.log import Transition
from roll.ledger.sample_history import HistoryEntry, group_of, history_of, read_records

_STATE_ORDER = ("queued", "generating", "paused", "acting", "scoring", "scored", "kept", "trained", "dropped", "failed")


@dataclass(frozen=True)
class Attempt:
    """A sample's history in ledger order, and its state in the lineage: None if all of it was rolled back."""

    group: str
    sample: str
    steps: tuple[HistoryEntry, ...]
    state: str | None
    reason: str
    reward: float | None


@dataclass(frozen=True)
class Ends:
    """Counts of groups or tasks: `open` if a sample is not finished, else trained if one was, else dropped, else
    failed."""

    trained: int
    dropped: int
    failed: int
    open: int


@dataclass(frozen=True)
class Problem:
    """A sample that breaks the ledger's rule: every sample has a task and is trained, or dropped with a reason, once."""

    sample: str
    what: str


@dataclass(frozen=True)
class LedgerBalance:
    groups: Ends
    tasks: Ends
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class ReasonCount:
    """A reason for dropping, failing or requeueing: how many samples and tasks have it in the lineage now, and how often
    it is in the ledger."""

    state: str
    reason: str
    samples: int
    tasks: int
    times: int
    example: str


@dataclass(frozen=True)
class StateLatency:
    """Seconds that samples spent in a state until they left it."""

    state: str
    times: int
    mean_s: float
    p50_s: float
    p99_s: float
    max_s: float
    total_s: float


@dataclass(frozen=True)
class TaskSolveRate:
    """A task's rewards: the mean over scored samples, in `visits` groups that have one, the last scored at
    `last_visit_s`."""

    task: str
    solve_rate: float
    samples: int
    visits: int
    last_visit_s: float


class LedgerIndex:
    """Answers queries about the ledger as it was when the index was opened."""

    def __init__(self, record: Path, database: sqlite3.Connection) -> None:
        self.record = record
        self._database = database

    @classmethod
    def open(cls, record: Path, progress: Progress | None = None) -> LedgerIndex:
        """The index of the ledger at `record`, updated."""
        if not record.exists():
            raise UserError(f"{record} does not exist: write the folder of a run that has a ledger")
        try:
            return cls(record, open_updated(record, progress))
        except sqlite3.Error as error:
            raise RunError(f"cannot make an index of {record}: {error}") from error

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> LedgerIndex:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        try:
            return self._database.execute(sql, values).fetchall()
        except sqlite3.DatabaseError as error:
            path = index_path(self.record)
            raise RunError(f"{path} cannot be read ({error}): delete it, it is made again from the ledger") from error

    def states(self) -> dict[str, int]:
        """Number of samples per state in the lineage."""
        counts = dict(self._query("SELECT state, count(*) FROM samples WHERE state IS NOT NULL GROUP BY state"))
        return {state: counts[state] for state in sorted(counts, key=state_order)}

    def rolled_back_samples(self) -> int:
        """Number of samples in the ledger but not in the lineage: all their transitions were rolled back and not
        repeated."""
        return int(self._query("SELECT count(*) FROM samples WHERE state IS NULL")[0][0])

    def span(self) -> tuple[float, float]:
        """When the lineage's first sample began, and the time of the last transition."""
        first, last = self._query("SELECT min(first_s), max(last_s) FROM samples")[0]
        return first or 0.0, last or 0.0

    def balance(self) -> LedgerBalance:
        """Whether every group ended or is still open, and no sample ended twice."""
        problems = self._query(
            "SELECT sample, CASE WHEN ends > 1 THEN 'ended ' || ends || ' times' WHEN task IS NULL THEN 'is of no task' "
            "WHEN state IN ('dropped', 'failed') AND reason = '' THEN state || ' without a reason' END AS what "
            "FROM samples WHERE state IS NOT NULL AND what IS NOT NULL ORDER BY grp, sample"
        )
        return LedgerBalance(self._ends("grp"), self._ends("task"), tuple(Problem(*found) for found in problems))

    def _ends(self, key: str) -> Ends:
        counts = self._query(
            "SELECT CASE WHEN goes_on THEN 'open' WHEN trained THEN 'trained' WHEN dropped THEN 'dropped' "
            "ELSE 'failed' END AS ended, count(*) FROM (SELECT max(state = 'trained') AS trained, "
            "max(state = 'dropped') AS dropped, max(state NOT IN ('trained', 'dropped', 'failed')) AS goes_on "
            f"FROM samples WHERE state IS NOT NULL AND {key} IS NOT NULL GROUP BY {key}) GROUP BY ended"
        )
        return Ends(**{"trained": 0, "dropped": 0, "failed": 0, "open": 0, **dict(counts)})

    def reasons(self) -> list[ReasonCount]:
        """Why samples were dropped, failed or requeued, the most samples first; reasons that agree up to their colon are
        one."""
        current = self._query(
            "SELECT state, trim(substr(reason, 1, instr(reason || ':', ':') - 1)) AS class, count(*), "
            "count(DISTINCT task), min(reason) FROM samples WHERE state IS NOT NULL AND reason != '' "
            "GROUP BY state, class"
        )
        current_counts = {(state, kind): rest for state, kind, *rest in current}
        counts = []
        for state, kind, times in self._query("SELECT state, class, times FROM reasons"):
            samples, tasks, example = current_counts.get((state, kind), (0, 0, kind))
            counts.append(ReasonCount(state, kind, samples, tasks, times, example))
        return sorted(counts, key=lambda count: (-count.samples, -count.times, count.state, count.reason))

    def state_latencies(self) -> list[StateLatency]:
        """Seconds per state, in the order of a sample's lifecycle."""
        rows = self._query("SELECT state, bucket, times, total_s, longest_s FROM stages ORDER BY state, bucket")
        latencies = [_state_latency(state, list(buckets)) for state, buckets in groupby(rows, key=lambda row: row[0])]
        return sorted(latencies, key=lambda latency: state_order(latency.state))

    def solve_rates(self) -> list[TaskSolveRate]:
        """The mean reward per task that has one, the hardest first."""
        rows = self._query(
            "SELECT task, avg(reward) AS rate, count(*), count(DISTINCT grp), max(scored_s) FROM samples "
            "WHERE reward IS NOT NULL AND task IS NOT NULL GROUP BY task ORDER BY rate, task"
        )
        return [TaskSolveRate(*row) for row in rows]

    def task(self, task: str) -> list[Attempt]:
        """Every sample that attempted the task, in the order they began."""
        rows = self._query("SELECT sample, offsets FROM samples JOIN attempts USING (grp) WHERE attempts.task = ?", task)
        if not rows:
            near = "SELECT DISTINCT task FROM attempts ORDER BY abs(length(task) - length(?)) LIMIT 5000"
            raise UserError(f"no sample of {self.record} is of a task {task!r}{self._suggestion(near, task)}")
        with self.record.open("rb") as file:
            attempts = [
                _attempt(sample, read_records(file, self.record, offsets), task)
                for sample, offsets in sorted(rows, key=_first_offset)
            ]
        return [attempt for attempt in attempts if attempt.steps]

    def sample(self, sample: str) -> Attempt:
        """A sample's whole history."""
        rows = self._query("SELECT offsets FROM samples WHERE grp = ? AND sample = ?", group_of(sample), sample)
        if not rows:
            near = "SELECT sample FROM samples ORDER BY abs(length(sample) - length(?)) LIMIT 5000"
            raise UserError(f"{self.record} has no sample {sample!r}{self._suggestion(near, sample)}")
        with self.record.open("rb") as file:
            return _attempt(sample, read_records(file, self.record, rows[0][0]))

    def _suggestion(self, sql: str, name: str) -> str:
        return did_you_mean(name, [name for (name,) in self._query(sql, name)])


def state_order(state: str) -> tuple[int, str]:
    """Sort key: the order in which a sample passes through its states."""
    return (_STATE_ORDER.index(state) if state in _STATE_ORDER else len(_STATE_ORDER)), state


def _first_offset(row: tuple[str, bytes]) -> int:
    """The offset of a sample's first record."""
    return int.from_bytes(row[1][:8], "little")


def _attempt(sample: str, records: list[tuple[int, Transition]], task: str | None = None) -> Attempt:
    """A sample's history, or the part of it that belongs to the task."""
    steps = [step for step in history_of(records) if task is None or step.task == task]
    row = IndexRow(group_of(sample), sample).from_history(steps)
    return Attempt(row.grp, sample, tuple(steps), row.state, row.reason, row.reward)


def _state_latency(state: str, rows: list[tuple[Any, ...]]) -> StateLatency:
    """From rows of (state, bucket, times, total_s, longest_s) in the buckets' order."""
    counts = [(bucket, times) for _, bucket, times, _, _ in rows]
    times, total_s, max_s = sum(row[2] for row in rows), sum(row[3] for row in rows), max(row[4] for row in rows)
    p50_s, p99_s = (min(max_s, quantile(counts, part)) for part in (0.5, 0.99))
    return StateLatency(state, times, total_s / times, p50_s, p99_s, max_s, total_s)
