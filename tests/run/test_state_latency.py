"""The clock of stages says what a plain count over all moves would, and holds nothing that grows with a run."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.rollout.lifecycle import MOVES
from roll.run import Transition
from roll.run.state_latency import LatencySpread, StateClock, StateRow, WaitTimes

ENDS = ("trained", "dropped", "failed")


@dataclass
class Plain:
    """What the clock should say, from lists of everything."""

    walks: dict[str, list[Transition]] = field(default_factory=lambda: defaultdict(list))
    stays: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    seen: set[str] = field(default_factory=set)
    generated: int = 0
    wasted: int = 0

    def append(self, transition: Transition) -> None:
        walk = self.walks[transition.sample]
        if walk and walk[-1].state not in ENDS:
            self.stays[walk[-1].state].append(max(transition.time_s - walk[-1].time_s, 0.0))
        if transition.state in ("queued", "dropped", "failed"):
            tries = [i for i, move in enumerate(walk) if move.state in ("queued", "failed")]
            self.wasted += sum(move.info.get("tokens", 0) for move in walk[tries[-1] if tries else 0 :])
        if transition.state not in ENDS:
            self.seen.add(transition.state)
        self.generated += transition.info.get("tokens", 0)
        walk.append(transition)

    @property
    def open(self) -> list[Transition]:
        return [walk[-1] for walk in self.walks.values() if walk[-1].state not in ENDS]

    def take(self) -> dict[str, Any]:
        depth = Counter(transition.state for transition in self.open)
        values: dict[str, Any] = {f"queue/{state}": depth[state] for state in self.seen}
        for state, times in self.stays.items():
            times.sort()
            values[f"state/{state}_s_mean"] = pytest.approx(sum(times) / len(times))
            values[f"state/{state}_s_max"] = times[-1]
            values[f"state/{state}_s_p99"] = pytest.approx(nearest_rank(times), rel=0.01, abs=1e-6)
        values["rollout/discarded_tokens"] = self.wasted
        if self.generated:
            values["rollout/discarded_token_ratio"] = self.wasted / self.generated
        self.stays.clear()
        self.generated = self.wasted = 0
        return values


def nearest_rank(times: list[float]) -> float:
    """The least of the times that at least 99 % of them do not exceed."""
    return next(x for x in sorted(times) if 100 * sum(y <= x for y in times) >= 99 * len(times))


def random_moves(samples: int, number: int, chance: random.Random) -> list[Transition]:
    """Moves of several samples in the order of time, but for clocks that are a little wrong."""
    states = {f"{sample}.0": "new" for sample in range(samples)}
    found = []
    for moment in range(number):
        choices = [sample for sample, state in states.items() if MOVES[state]]
        if not choices:
            break
        sample = chance.choice(choices)
        moves = sorted(MOVES[states[sample]])
        states[sample] = state = chance.choice([new for new in moves for _ in range(1 if new in ENDS else 4)])
        info = {
            "scoring": {"tokens": chance.randrange(50)},
            "generating": {"engine": chance.randrange(2), "worker": 5},
        }.get(state, {})
        skew_s = chance.choice((0, 0, 0, -1.7, 1e-7))
        found.append(Transition(sample, state, "", moment * 0.7 + skew_s, info))
    return found


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 12), st.integers(1, 80), st.integers(1, 30), st.integers(0, 2**32))
def test_the_clock_equals_a_plain_count(samples: int, number: int, interval: int, seed: int) -> None:
    clock, plain = StateClock(), Plain()
    for count, transition in enumerate(random_moves(samples, number, random.Random(seed)), start=1):
        clock.append(transition)
        plain.append(transition)
        if count % interval == 0:
            assert clock.take() == plain.take()
        oldest = {waiting.state: now_s - waiting.seconds for now_s in (100.0,) for waiting in clock.longest_waits(now_s)}
        states = {t.state for t in plain.open}
        assert oldest == pytest.approx({s: min(t.time_s for t in plain.open if t.state == s) for s in states})
        assert {row.state: row.now for row in clock.table().rows} == {
            state: sum(t.state == state for t in plain.open) for state in plain.seen
        }
    assert clock.take() == plain.take()


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 300), st.floats(1e-6, 1e4), st.floats(0, 3), st.integers(0, 2**32))
def test_the_99th_percentile_is_within_a_hundredth(number: int, middle: float, width: float, seed: int) -> None:
    chance = random.Random(seed)
    times = [middle * chance.lognormvariate(0, width) * (chance.random() > 0.05) for _ in range(number)]
    spread = LatencySpread()
    for seconds in times:
        spread.add(seconds)
    assert spread.p99 == pytest.approx(nearest_rank(times), rel=0.01, abs=1e-6)
    assert spread.p99 <= spread.longest == max(times)
    assert spread.mean == pytest.approx(sum(times) / len(times))


@pytest.mark.parametrize(
    ("times", "p99"),
    [
        ([0.0] * 198 + [5.0] * 2, 0.0),
        ([0.0] * 197 + [5.0] * 3, 5.0),
        ([5e-324] * 300, 0.0),
        ([*range(100, 0, -1)], 99.0),
        ([3.0], 3.0),
    ],
)
def test_the_99th_percentile_of_few_times(times: list[float], p99: float) -> None:
    spread = LatencySpread()
    for seconds in times:
        spread.add(seconds)
    assert spread.p99 == pytest.approx(p99, rel=0.01, abs=1e-6)


def test_percentiles_of_many_times_take_little_memory() -> None:
    chance = random.Random(0)
    spread = LatencySpread()
    for _ in range(20_000):
        spread.add(chance.lognormvariate(0, 3))
    assert len(spread._buckets) < 1200
    assert spread.count == 20_000


def moved(clock: StateClock, sample: str, *steps: tuple[float, str], **info: int) -> None:
    for time_s, state in steps:
        clock.append(Transition(sample, state, "", time_s, info))


def test_a_stay_counts_in_the_interval_in_which_it_ends() -> None:
    clock = StateClock()
    moved(clock, "a", (0, "queued"), (1, "generating"))
    first = clock.take()
    assert {name: first[name] for name in first if name.startswith("state")} == {
        "state/queued_s_mean": 1,
        "state/queued_s_p99": 1,
        "state/queued_s_max": 1,
    }
    assert (first["queue/queued"], first["queue/generating"]) == (0, 1)
    moved(clock, "a", (5, "scoring"), (7, "scored"))
    second = clock.take()
    assert (second["state/generating_s_mean"], second["state/scoring_s_max"]) == (4, 2)
    assert "state/queued_s_mean" not in second
    assert clock.take() == {f"queue/{s}": int(s == "scored") for s in ("queued", "generating", "scoring", "scored")} | {
        "rollout/discarded_tokens": 0
    }


@pytest.mark.parametrize(
    ("end", "wasted"), [("dropped", 90), ("failed", 90), ("queued", 90), ("rolled_back", 90), ("trained", 0)]
)
def test_tokens_are_wasted_when_nobody_trains_on_them(end: str, wasted: int) -> None:
    clock = StateClock()
    moved(clock, "a", (0, "generating"), (1, "scoring"), (2, "scored"), tokens=90)
    moved(clock, "b", (0, "generating"), (1, "scoring"), (2, "scored"), tokens=30)
    moved(clock, "a", (3, end))
    taken = clock.take()
    assert (taken["rollout/discarded_tokens"], taken["rollout/discarded_token_ratio"]) == (wasted, wasted / 120)


def test_what_is_thrown_away_later_counts_then() -> None:
    clock = StateClock()
    moved(clock, "a", (0, "scoring"), tokens=90)
    moved(clock, "b", (0, "scoring"), tokens=10)
    assert clock.take()["rollout/discarded_token_ratio"] == 0
    moved(clock, "a", (1, "dropped"))
    assert clock.table().waste_share == 0, "of the interval before: nothing was generated in this one"
    taken = clock.take()
    assert taken["rollout/discarded_tokens"] == 90
    assert "rollout/discarded_token_ratio" not in taken
    moved(clock, "c", (2, "scoring"), tokens=5)
    moved(clock, "b", (3, "dropped"))
    assert clock.table().waste_share == 2


def test_the_longest_waiting_of_each_state_are_named_with_their_place() -> None:
    clock = StateClock()
    clock.append(Transition("1.0", "queued", time_s=5))
    clock.append(Transition("1.1", "queued", time_s=4))
    for sample, time_s in (("2.0", 7), ("2.1", 6)):
        clock.append(Transition(sample, "generating", time_s=time_s, info={"engine": 3, "worker": 0}))
    clock.append(Transition("2.1", "acting", time_s=9))
    clock.append(Transition("3.0", "generating", time_s=1, info={"engine": 1}))
    clock.append(Transition("3.0", "queued", "engine died", time_s=9))
    clock.append(Transition("4.0", "scored", time_s=0))
    clock.append(Transition("4.0", "dropped", time_s=1))
    assert clock.longest_waits(10) == [
        WaitTimes("queued", "1.1", 6, ""),
        WaitTimes("generating", "2.0", 3, "engine 3, worker 0"),
        WaitTimes("acting", "2.1", 1, "engine 3, worker 0"),
    ]
    clock.append(Transition("1.1", "dropped", time_s=9))
    clock.append(Transition("1.0", "dropped", time_s=9))
    assert [waiting for waiting in clock.longest_waits(10) if waiting.state == "queued"] == [
        WaitTimes("queued", "3.0", 1, "")
    ]


def test_who_waits_is_told_by_the_real_time() -> None:
    clock = StateClock()
    clock.append(Transition("1.0", "queued", time_s=time.time() - 60))
    (waiting,) = clock.longest_waits()
    assert 60 <= waiting.seconds < 70


def test_the_table_is_in_the_order_of_a_life_and_remembers_one_interval() -> None:
    clock = StateClock()
    assert clock.table().rows == ()
    moved(clock, "a", (0, "scoring"), (1, "anew"))
    moved(clock, "b", (0, "queued"), (2, "generating"))
    rows = (StateRow("queued", 0, 2, 2), StateRow("generating", 1), StateRow("scoring", 0, 1, 1), StateRow("anew", 1))
    assert clock.table().rows == rows
    clock.take()
    assert clock.table().rows == rows, "nothing has left a stage yet"
    moved(clock, "c", (0, "queued"), (5, "generating"))
    assert clock.table().rows[0] == StateRow("queued", 0, 5, 5)
    clock.take()
    clock.take()
    assert clock.table().rows[0] == StateRow("queued", 0)


def test_only_open_samples_are_held() -> None:
    clock = StateClock()
    for number in range(100):
        moved(clock, f"{number}.0", (number, "queued"), (number + 1, "generating"), (number + 2, "scoring"))
        end = ("trained", "dropped", "failed", "rolled_back")[number % 4]
        moved(clock, f"{number}.0", (number + 3, end))
    assert not clock._open
    assert not clock.longest_waits()
    taken = clock.take()
    assert [taken[f"queue/{state}"] for state in ("queued", "generating", "scoring")] == [0, 0, 0]
