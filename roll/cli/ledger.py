"""The output of `roll ledger`: results of a ledger's index, as tables or as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from datetime import datetime
from functools import partial
from itertools import pairwise
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from roll.ledger.index import Attempt, Ends, LedgerBalance, LedgerIndex, ReasonCount, StateLatency, TaskSolveRate
from roll.ledger.log import ROLLED_BACK
from roll.ledger.sample_history import HistoryEntry

_TOP = 5
_ROWS = 40
_EPOCH_S = 1e8
"""Smaller times are seconds of a simulation, not dates."""


@dataclass(frozen=True)
class LedgerQuery:
    """What to show; by default the summary."""

    task: str | None = None
    sample: str | None = None
    dropped: bool = False
    stages: bool = False
    solve_rates: bool = False


@dataclass(frozen=True)
class LedgerSummary:
    """A run on one screen. The times are those of the first sample's beginning and of the last transition."""

    samples: dict[str, int]
    undone: int
    first_s: float
    last_s: float
    balance: LedgerBalance
    reasons: list[ReasonCount]
    stages: list[StateLatency]


@dataclass(frozen=True)
class LedgerResult:
    """A result: its name in JSON, its value, and how it is rendered."""

    name: str
    value: Any
    show: Callable[[Any], Iterator[RenderableType]]


def run_query(index: LedgerIndex, query: LedgerQuery) -> list[LedgerResult]:
    """The results, in a fixed order."""
    results = []
    if query.task is not None:
        results.append(LedgerResult("task", index.task(query.task), partial(_task, query.task)))
    if query.sample is not None:
        results.append(LedgerResult("sample", index.sample(query.sample), _sample))
    if query.dropped:
        results.append(LedgerResult("dropped", index.reasons(), _reasons))
    if query.stages:
        results.append(LedgerResult("stages", index.state_latencies(), _state_latencies))
    if query.solve_rates:
        results.append(LedgerResult("solve_rates", index.solve_rates(), _solve_rates))
    return results or [LedgerResult("summary", _summary_of(index), _summary)]


def print_results(console: Console, results: list[LedgerResult], as_json: bool) -> None:
    if as_json:
        print(json.dumps({result.name: _plain(result.value) for result in results}, indent=2))
        return
    for result in results:
        for part in result.show(result.value):
            console.print(part, highlight=False)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _summary_of(index: LedgerIndex) -> LedgerSummary:
    first_s, last_s = index.span()
    return LedgerSummary(
        index.states(),
        index.rolled_back_samples(),
        first_s,
        last_s,
        index.balance(),
        index.reasons(),
        index.state_latencies(),
    )


def _summary(summary: LedgerSummary) -> Iterator[RenderableType]:
    total = sum(summary.samples.values())
    began, ended = when(summary.first_s), when(summary.last_s)
    if not total and not summary.undone:
        yield Text("Nothing is recorded yet.")
        return
    yield Text(f"{total:,} samples, {began} to {ended} ({seconds(summary.last_s - summary.first_s)} s)", style="bold")
    yield _table(
        ["state", ">samples", ">share"],
        ([state, f"{count:,}", f"{count / total:.1%}"] for state, count in summary.samples.items()),
    )
    for name, ends in (("groups", summary.balance.groups), ("tasks", summary.balance.tasks)):
        yield Text(f"{name}: {_ended(ends)}")
    if summary.undone:
        yield Text(f"{summary.undone:,} more samples were undone by going back to a checkpoint, and not done again")
    if summary.reasons:
        yield from _reasons(summary.reasons[:_TOP])
    yield from _state_latencies(summary.stages)
    yield from _verdict(summary.balance)


def _ended(ends: Ends) -> str:
    return f"{ends.trained:,} trained, {ends.dropped:,} dropped, {ends.failed:,} failed, {ends.open:,} open"


def _verdict(balance: LedgerBalance) -> Iterator[RenderableType]:
    if not balance.problems:
        yield Text("It balances: every group ended or is open, and nothing ended twice.", style="green")
        return
    yield Text(f"It does not balance: {len(balance.problems):,} samples break a promise.", style="red")
    for problem in balance.problems[:_TOP]:
        yield Text(f"  sample {problem.sample} {problem.what} (roll ledger RUN --sample {problem.sample})")
    yield from _left_out(len(balance.problems) - _TOP)


def _reasons(counts: list[ReasonCount]) -> Iterator[RenderableType]:
    if not counts:
        yield Text("No sample was dropped, failed or queued again for a reason.")
        return
    yield _table(
        ["why", "became", ">samples", ">tasks", ">times on record", "for example"],
        (
            [count.reason, count.state, f"{count.samples:,}", f"{count.tasks:,}", f"{count.times:,}", count.example]
            for count in counts[:_ROWS]
        ),
    )
    yield from _left_out(len(counts) - _ROWS)


def _state_latencies(latencies: list[StateLatency]) -> Iterator[RenderableType]:
    total_s = sum(latency.total_s for latency in latencies) or 1.0
    yield _table(
        ["seconds in", ">times", ">mean", ">p50", ">p99", ">max", ">of all"],
        (
            [
                *(
                    latency.state,
                    f"{latency.times:,}",
                    seconds(latency.mean_s),
                    seconds(latency.p50_s),
                    seconds(latency.p99_s),
                ),
                *(seconds(latency.max_s), f"{latency.total_s / total_s:.1%}"),
            ]
            for latency in latencies
        ),
    )


def _solve_rates(rates: list[TaskSolveRate]) -> Iterator[RenderableType]:
    if not rates:
        yield Text("No sample was scored.")
        return
    mean = sum(rate.solve_rate for rate in rates) / len(rates)
    never, always = (sum(rate.solve_rate == edge for rate in rates) for edge in (0.0, 1.0))
    yield Text(f"{len(rates):,} tasks, mean {mean:.3f}; {never:,} at 0, {always:,} at 1; the hardest first", style="bold")
    yield _table(
        ["task", ">solve rate", ">samples", ">visits", "last visit"],
        (
            [rate.task, f"{rate.solve_rate:.3f}", f"{rate.samples:,}", f"{rate.visits:,}", when(rate.last_visit_s)]
            for rate in rates[:_ROWS]
        ),
    )
    yield from _left_out(len(rates) - _ROWS)


def _task(task: str, attempts: list[Attempt]) -> Iterator[RenderableType]:
    groups = list(dict.fromkeys(attempt.group for attempt in attempts))
    counting = sum(attempt.state is not None for attempt in attempts)
    yield Text(f"task {task}: {len(attempts):,} samples in {len(groups):,} groups, {counting:,} of them count", "bold")
    for group in groups:
        samples = [attempt for attempt in attempts if attempt.group == group]
        began = when(samples[0].steps[0].transition.time_s)
        yield Text(f"group {group}, {began}, and the seconds in each state", style="bold")
        grid = Table.grid(padding=(0, 2))
        for attempt in samples:
            counts = "" if attempt.state is not None else "does not count"
            grid.add_row(Text(attempt.sample), _reward(attempt.reward), _path(attempt.steps), counts)
        yield grid


def _sample(attempt: Attempt) -> Iterator[RenderableType]:
    where = "does not count: it was undone" if attempt.state is None else f"is {attempt.state}"
    first_s = attempt.steps[0].transition.time_s
    yield Text(f"sample {attempt.sample} of group {attempt.group}, begun {when(first_s)}, {where}", style="bold")
    yield _table(
        [">at s", ">for s", "state", "counts", "reason", "info"],
        (
            [
                *(_since(first_s, step.transition.time_s), spent, step.transition.state, "yes" if step.counts else "no"),
                *(step.transition.reason, _listed(step.transition.info)),
            ]
            for step, spent in zip(attempt.steps, _spent(attempt.steps), strict=True)
        ),
    )


def _listed(info: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in info.items())


def _path(steps: Sequence[HistoryEntry]) -> Text:
    """`queued 0.01 → generating 2.1 → dropped (stale: two versions old)`; transitions that do not count are dim."""
    path = Text()
    for step, spent in zip(steps, _spent(steps), strict=True):
        reason = f"({step.transition.reason})" if step.transition.reason else ""
        path.append(" → " if path else "")
        text = " ".join(part for part in (step.transition.state, reason, spent) if part)
        path.append(text, style="" if step.counts else "dim")
    return path


def _spent(steps: Sequence[HistoryEntry]) -> list[str]:
    """Seconds from each transition to the next; empty for the last, and around a rollback."""
    spent = []
    for move, after in pairwise(step.transition for step in steps):
        went_back = ROLLED_BACK in (move.state, after.state)
        spent.append("" if went_back else _since(move.time_s, after.time_s))
    return [*spent, ""]


def _since(first_s: float | None, time_s: float | None) -> str:
    return "" if first_s is None or time_s is None else seconds(time_s - first_s)


def _left_out(count: int) -> Iterator[RenderableType]:
    if count > 0:
        yield Text(f"… and {count:,} more: --json has all of them", style="dim")


def _table(columns: list[str], rows: Iterable[list[str]]) -> Table:
    """A table of plain texts; columns whose names begin with > have numbers."""
    table = Table()
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _reward(value: float | None) -> str:
    return "" if value is None else f"reward {value:.3g}"


def seconds(value: float) -> str:
    """Seconds with three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def when(time_s: float | None) -> str:
    """A time in the local time zone; for a simulation, its seconds."""
    if time_s is None:
        return ""
    return f"{datetime.fromtimestamp(time_s):%Y-%m-%d %H:%M:%S}" if time_s >= _EPOCH_S else f"{seconds(time_s)} s"
