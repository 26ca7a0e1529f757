"""How long samples stay in each state, how many are in it now, and how many generated tokens were discarded.

`StateClock` gets every transition and answers three questions: what happened in an interval (`take`, for metrics), what
the current situation is (`table`, for a display), and which samples wait longest (`longest_waits`, for a watchdog).

Invariants: a stay is counted once, in the interval in which it ends. Only unfinished samples are stored; finished stays
are only counted, so memory does not grow with the run. Mean and maximum are exact; p99 comes from a histogram whose
buckets grow by 2 %, so it is within 1 % of the true value, or within a microsecond where that is more.

By example, with `take` called at 4 s and at 9 s:

    0 s  a queued
    1 s  a generating     take at 4 s: queued 1 s                       now: generating 1
    5 s  a scoring
    7 s  a scored         take at 9 s: generating 4 s, scoring 2 s      now: scored 1
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import ceil, exp, log
from typing import Any

from roll.ledger.log import ROLLED_BACK, Transition

ENDS = frozenset({"trained", "dropped", "failed", ROLLED_BACK})
"""Final states. A failed sample may be queued again; the clock then treats it as a new sample."""
_STATE_ORDER = ("queued", "generating", "paused", "acting", "scoring", "scored", "kept")
_WIDTH = log(1.02)
_SHORTEST_S = 5e-7


@dataclass(frozen=True)
class StateRow:
    """A state now: the samples in it, and how long samples that left it recently had stayed (None: none left)."""

    state: str
    now: int
    mean_s: float | None = None
    p99_s: float | None = None


@dataclass(frozen=True)
class StateTable:
    """All states that a run has seen, in the order of a sample's lifecycle, and further measures of the rollout."""

    rows: tuple[StateRow, ...] = ()
    waste_share: float | None = None
    """Tokens of samples that were dropped, failed or requeued, divided by the generated tokens."""
    staleness_mean: float | None = None
    """Versions between the weights that sampled a sample and the weights that it trains."""
    staleness_max: float | None = None


@dataclass(frozen=True)
class WaitTimes:
    """A waiting sample: its state, for how long, and where (empty if unknown)."""

    state: str
    sample: str
    seconds: float
    where: str


@dataclass(slots=True)
class _Stay:
    """The current state of an unfinished sample, and the tokens generated for it."""

    state: str
    since_s: float
    tokens: int = 0
    engine: Any = None
    worker: Any = None

    @property
    def where(self) -> str:
        locations = (("engine", self.engine), ("worker", self.worker))
        return ", ".join(f"{kind} {number}" for kind, number in locations if number is not None)


class LatencySpread:
    """Count, mean and maximum of durations, and their 99th percentile within 1 % or a microsecond."""

    __slots__ = ("_buckets", "count", "longest", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.longest = 0.0
        self._buckets: dict[int, int] = {}

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total += seconds
        if seconds > self.longest:
            self.longest = seconds
        bucket = ceil(log(max(seconds, _SHORTEST_S)) / _WIDTH)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def p99(self) -> float:
        """The smallest duration that at least 99 % of them do not exceed."""
        rank = -(-99 * self.count // 100)
        if rank == self.count:
            return self.longest
        cumulative = 0
        for bucket in sorted(self._buckets):
            cumulative += self._buckets[bucket]
            if cumulative >= rank:
                return min(exp((bucket - 0.5) * _WIDTH), self.longest)
        raise AssertionError("the buckets hold every time that was counted")


class StateClock:
    """Gets transitions in the order they arrive; those of one sample in the order they happened."""

    def __init__(self) -> None:
        self._open: dict[str, _Stay] = {}
        self._counts: dict[str, int] = {}
        self._spreads: dict[str, LatencySpread] = {}
        self._previous_spreads: dict[str, LatencySpread] = {}
        self._generated = 0
        self._wasted = 0
        self._previous_waste_share: float | None = None

    def append(self, transition: Transition) -> None:
        state, info = transition.state, transition.info
        stay = self._open.get(transition.sample)
        if stay is not None:
            self._leave(stay, transition.time_s)
            if stay.tokens and state != "trained" and (state == "queued" or state in ENDS):
                self._wasted += stay.tokens
                stay.tokens = 0
        if state in ENDS:
            self._open.pop(transition.sample, None)
            return
        if stay is None:
            stay = self._open[transition.sample] = _Stay(state, transition.time_s)
        else:
            stay.state, stay.since_s = state, transition.time_s
        self._counts[state] = self._counts.get(state, 0) + 1
        if state == "generating":
            stay.engine, stay.worker = info.get("engine"), info.get("worker")
        elif state == "scoring":
            stay.tokens = info.get("tokens", 0)
            self._generated += stay.tokens
        elif state == "queued":
            stay.engine = stay.worker = None

    def take(self) -> dict[str, float]:
        """The metrics of the interval since the last call; a new interval begins.

        `state/<state>_s_mean`, `_p99` and `_max` of stays that ended in it, absent if none did; `queue/<state>`, samples
        now in the state; `rollout/discarded_tokens`, the tokens of samples that were dropped, failed or requeued in it;
        `rollout/discarded_token_ratio`, those divided by the tokens generated in it (above 1 if more tokens from earlier
        intervals were discarded), absent if none were generated.
        """
        values: dict[str, float] = {}
        for state, spread in self._spreads.items():
            values[f"state/{state}_s_mean"] = spread.mean
            values[f"state/{state}_s_p99"] = spread.p99
            values[f"state/{state}_s_max"] = spread.longest
        values |= {f"queue/{state}": depth for state, depth in self._counts.items()}
        values["rollout/discarded_tokens"] = self._wasted
        share = self._waste_share
        if share is not None:
            values["rollout/discarded_token_ratio"] = share
        self._previous_spreads, self._spreads = self._spreads, {}
        self._previous_waste_share = share
        self._generated = self._wasted = 0
        return values

    def table(self) -> StateTable:
        """The current situation. Durations are those of this interval, or of the previous one while no sample has left
        the state in this one."""
        states = [state for state in _STATE_ORDER if state in self._counts]
        states += [state for state in self._counts if state not in _STATE_ORDER]
        share = self._waste_share
        return StateTable(tuple(map(self._row, states)), share if share is not None else self._previous_waste_share)

    def longest_waits(self, now_s: float | None = None) -> list[WaitTimes]:
        """The sample that has waited longest in each state, longest first. `now_s` is for virtual clocks."""
        now_s = time.time() if now_s is None else now_s
        oldest: dict[str, tuple[str, _Stay]] = {}
        for sample, stay in self._open.items():
            if stay.state not in oldest or stay.since_s < oldest[stay.state][1].since_s:
                oldest[stay.state] = sample, stay
        found = [WaitTimes(stay.state, sample, now_s - stay.since_s, stay.where) for sample, stay in oldest.values()]
        return sorted(found, key=lambda waiting: -waiting.seconds)

    @property
    def _waste_share(self) -> float | None:
        return self._wasted / self._generated if self._generated else None

    def _leave(self, stay: _Stay, now_s: float) -> None:
        self._counts[stay.state] -= 1
        spread = self._spreads.get(stay.state)
        if spread is None:
            spread = self._spreads[stay.state] = LatencySpread()
        spread.add(max(now_s - stay.since_s, 0.0))  # clocks of nodes may differ by more than a short stay

    def _row(self, state: str) -> StateRow:
        spread = self._spreads.get(state) or self._previous_spreads.get(state)
        now = self._counts[state]
        return StateRow(state, now) if spread is None else StateRow(state, now, spread.mean, spread.p99)
