"""The life cycle of a sample: its states, the transitions between them, and the ledger that records every transition.

`MOVES` lists all allowed transitions; the diagram in `docs/guides/scheduling.md` is rendered from it.

Invariants: a transition that is not in the table is a bug and raises; the ledger has every transition with its reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

from roll.data.sample import Sample
from roll.ledger.log import Transition

State = Literal["queued", "generating", "acting", "paused", "scoring", "scored", "kept", "trained", "dropped", "failed"]

MOVES: Mapping[str, frozenset[str]] = {
    "new": frozenset({"queued"}),
    "queued": frozenset({"generating", "acting", "failed", "dropped"}),
    "generating": frozenset({"acting", "paused", "scoring", "queued", "failed", "dropped"}),
    "acting": frozenset({"generating", "scoring", "queued", "failed", "dropped"}),
    "paused": frozenset({"generating", "acting", "scoring", "queued", "failed", "dropped"}),
    "scoring": frozenset({"scored", "queued", "failed", "dropped"}),
    "scored": frozenset({"kept", "queued", "dropped"}),
    "kept": frozenset({"trained", "queued", "dropped"}),
    "failed": frozenset({"queued"}),
    "trained": frozenset(),
    "dropped": frozenset(),
}
"""A sample returns to `queued` when its engine dies (it resumes from its prefix) or its worker dies (it restarts)."""

ENDS = frozenset({"trained", "dropped", "failed"})


class TransitionSink(Protocol):
    """Where transitions are written: the run's ledger, or a rollout worker's report to the controller."""

    def append(self, transition: Transition) -> None: ...


class Lifecycle:
    """Moves samples from state to state and records each transition."""

    def __init__(self, ledger: TransitionSink | None, clock: Callable[[], float] = time.time) -> None:
        """Without a ledger, transitions are checked and timed but not recorded: evaluation samples are not part of the
        ledger. `clock` gives seconds since the epoch, so that times of several machines can be compared."""
        self._record = None if ledger is None else ledger.append
        self._clock = clock

    def move(self, sample: Sample, state: State, reason: str = "", time_s: float | None = None, **info: Any) -> None:
        """`time_s`: time of the transition, by default now."""
        now = self._clock() if time_s is None else time_s
        self.apply(sample, Transition(sample.id, state, reason, now, info))

    def move_all(self, samples: Iterable[Sample], state: State, reason: str = "", **info: Any) -> None:
        """Moves samples together, in their order: at one time, for one reason, with the same info."""
        now_s = self._clock()
        for sample in samples:
            self.apply(sample, Transition(sample.id, state, reason, now_s, info))

    def apply(self, sample: Sample, transition: Transition) -> None:
        """Moves a sample by a transition that happened elsewhere."""
        state, now_s, before = transition.state, transition.time_s, sample.state
        if state not in MOVES[before]:
            raise AssertionError(f"sample {sample.id} cannot go from {before} to {state}")
        if before != "new":
            seconds, spent_s = sample.seconds, now_s - sample.entered_s
            seconds[before] = seconds.get(before, 0.0) + (spent_s if spent_s > 0.0 else 0.0)
        sample.state, sample.reason, sample.entered_s = state, transition.reason, now_s
        if self._record is not None:
            self._record(transition)

    def close_unfinished(self, samples: Sequence[str], reason: str) -> None:
        """Records as dropped the samples that were in flight when an earlier process of the run ended."""
        if self._record is not None:
            for sample in samples:
                self._record(Transition(sample, "dropped", reason, self._clock()))
