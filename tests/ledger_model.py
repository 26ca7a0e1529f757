"""What a ledger's record says, made by plain Python: what its index must answer."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from roll.ledger.histogram import PRECISION
from roll.ledger.index import Ends, LedgerBalance, Problem, ReasonCount
from roll.run import ROLLED_BACK, Ledger, LedgerIndex, Transition

ENDED = ("trained", "dropped", "failed")


@dataclass
class Model:
    """What a record says, in the plainest way: each sample's way to each byte, copied at every record."""

    ways: dict[str, list[tuple[int, tuple[Transition, ...]]]] = field(default_factory=lambda: defaultdict(list))
    records: dict[str, list[Transition]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, path: Path) -> Model:
        model, offset = cls(), 0
        for line in path.read_bytes().splitlines(keepends=True):
            move = Transition.decode(line)
            ways = model.ways[move.sample]
            way = ways[-1][1] if ways else ()
            if move.state == ROLLED_BACK:
                before = [way for began, way in ways if began < move.info["position"]]
                way = before[-1] if before else ()
            else:
                way = (*way, move)
            ways.append((offset, way))
            model.records[move.sample].append(move)
            offset += len(line)
        return model

    @cached_property
    def finals(self) -> dict[str, tuple[Transition, ...]]:
        """The way of each sample in the lineage."""
        finals = {sample: ways[-1][1] for sample, ways in self.ways.items()}
        return {sample: way for sample, way in finals.items() if way}

    def states(self) -> dict[str, int]:
        return Counter(way[-1].state for way in self.finals.values())

    def balance(self) -> LedgerBalance:
        return LedgerBalance(self._ends(group), self._ends(self.task_of), tuple(self.problems()))

    def problems(self) -> Iterator[Problem]:
        for sample, way in sorted(self.finals.items(), key=lambda item: (group(item[0]), item[0])):
            ends = sum(move.state in ("trained", "dropped") for move in way)
            if ends > 1:
                yield Problem(sample, f"ended {ends} times")
            elif self.task_of(sample) is None:
                yield Problem(sample, "is of no task")
            elif way[-1].state in ("dropped", "failed") and not way[-1].reason:
                yield Problem(sample, f"{way[-1].state} without a reason")

    def task_of(self, sample: str) -> str | None:
        tasks = [move.info["task"] for move in self.finals[sample] if "task" in move.info]
        return tasks[-1] if tasks else None

    def _ends(self, key: Any) -> Ends:
        members = defaultdict(list)
        for sample, way in self.finals.items():
            if key(sample) is not None:
                members[key(sample)].append(way[-1].state)
        found = Counter(
            next((state for state in ENDED if state in states), "") if all(state in ENDED for state in states) else "open"
            for states in members.values()
        )
        return Ends(**{state: found[state] for state in (*ENDED, "open")})

    def reasons(self) -> list[ReasonCount]:
        times = Counter(
            (move.state, move.reason.split(":")[0].strip())
            for moves in self.records.values()
            for move in moves
            if move.reason and move.state != ROLLED_BACK
        )
        found = []
        for (state, kind), count in times.items():
            now = {
                sample: way[-1].reason
                for sample, way in self.finals.items()
                if (way[-1].state, way[-1].reason.split(":")[0].strip()) == (state, kind)
            }
            tasks = {self.task_of(sample) for sample in now} - {None}
            found.append(ReasonCount(state, kind, len(now), len(tasks), count, min(now.values(), default=kind)))
        return found

    def seconds(self) -> dict[str, list[float]]:
        spent = defaultdict(list)
        for moves in self.records.values():
            for move, after in pairwise(moves):
                if ROLLED_BACK not in (move.state, after.state):
                    spent[move.state].append(max(0.0, after.time_s - move.time_s))
        return spent

    def solve_rates(self) -> dict[str, tuple[float, int, int, float]]:
        scored = defaultdict(list)
        for sample, way in self.finals.items():
            scores = [move for move in way if move.state == "scored"]
            if scores and "reward" in scores[-1].info and self.task_of(sample) is not None:
                scored[self.task_of(sample)].append((scores[-1].info["reward"], group(sample), scores[-1].time_s))
        return {
            task: (
                statistics.mean(r for r, _, _ in found),
                len(found),
                len({g for _, g, _ in found}),
                max(found, key=last)[2],
            )
            for task, found in scored.items()
        }


def last(scored: tuple[float, str, float]) -> float:
    return scored[2]


def group(sample: str) -> str:
    return sample.rsplit(".", 1)[0] if "." in sample else sample


def nearest_rank(values: list[float], part: float) -> float:
    return sorted(values)[math.ceil(part * len(values)) - 1]


def check(path: Path, index: LedgerIndex) -> None:
    """Everything that can be asked, against the model."""
    model = Model.of(path)
    assert index.states() == model.states() == Counter(move.state for move in Ledger.lineage(path).values())
    assert index.rolled_back_samples() == len(model.ways) - len(model.finals)
    assert index.span() == (
        min((way[0].time_s for way in model.finals.values()), default=0.0),
        max((moves[-1].time_s for moves in model.records.values() if moves[-1].state != ROLLED_BACK), default=0.0),
    )
    assert index.balance() == model.balance()
    assert sorted(index.reasons(), key=str) == sorted(model.reasons(), key=str)
    check_stages(index, model.seconds())
    rates = {rate.task: (rate.solve_rate, rate.samples, rate.visits, rate.last_visit_s) for rate in index.solve_rates()}
    assert {task: pytest.approx(rate) for task, rate in model.solve_rates().items()} == rates
    for sample, moves in model.records.items():
        history_of = index.sample(sample)
        assert [step.transition for step in history_of.steps] == moves
        way = model.ways[sample][-1][1]
        assert [step.transition for step in history_of.steps if step.counts] == list(way)
        assert (history_of.state, history_of.reason) == ((way[-1].state, way[-1].reason) if way else (None, ""))
    check_tasks(index, model)


def check_stages(index: LedgerIndex, seconds: dict[str, list[float]]) -> None:
    stages = {stage.state: stage for stage in index.state_latencies()}
    assert stages.keys() == seconds.keys()
    for state, values in seconds.items():
        stage = stages[state]
        assert stage.times == len(values)
        assert stage.max_s == max(values)
        assert stage.total_s == pytest.approx(sum(values))
        assert stage.mean_s == pytest.approx(statistics.mean(values))
        assert stage.p50_s == pytest.approx(nearest_rank(values, 0.5), rel=PRECISION * 1.0001, abs=0)
        assert stage.p99_s == pytest.approx(nearest_rank(values, 0.99), rel=PRECISION * 1.0001, abs=0)


def check_tasks(index: LedgerIndex, model: Model) -> None:
    """Every record of a sample belongs to the task that it was last queued for, on the way that it then was on."""
    moves: dict[str, list[Transition]] = defaultdict(list)
    for sample, records in model.records.items():
        before: tuple[Transition, ...] = ()
        for move, (_, way) in zip(records, model.ways[sample], strict=True):
            tasks = [each.info["task"] for each in (before if move.state == ROLLED_BACK else way) if "task" in each.info]
            if tasks:
                moves[tasks[-1]].append(move)
            before = way
    for task, expected in moves.items():
        attempts = index.task(task)
        assert sorted(str(step.transition) for each in attempts for step in each.steps) == sorted(map(str, expected))
        finals = {sample for sample, way in model.finals.items() if any(move.info.get("task") == task for move in way)}
        assert {attempt.sample for attempt in attempts if attempt.state is not None} == finals


def asked(path: Path) -> LedgerIndex:
    with LedgerIndex.open(path) as index:
        check(path, index)
    return index


def lives(count: int, start: int = 0) -> list[Transition]:
    states = ("queued", "generating", "scored", "trained")
    return [
        Transition(f"{number // 4}.{number % 4}", state, time_s=number + 0.1, info={"task": f"t{number % 7}"})
        for number in range(start, start + count)
        for state in states
    ]


def write(path: Path, records: list[Transition]) -> None:
    with Ledger.open(path) as ledger:
        ledger.append_many(records)
