"""The life of a sample: its states, the moves between them, and the ledger that records every move.

`MOVES` is the whole of it: what is not in the table cannot happen, and `docs/scheduling.md` draws its picture from it.

What always holds: a move that is not in the table is a bug and raises; every move is on the ledger with its reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
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
"""`queued` comes again when a sample lost its engine (it goes on from its prefix) or its worker (it starts anew)."""

ENDS = frozenset({"trained", "dropped", "failed"})


class TransitionSink(Protocol):
    """Where moves are written: the run's ledger, or a report to the one who keeps it."""

    def append(self, transition: Transition) -> None: ...


class Lifecycle:
    """Moves samples from state to state and writes them down."""

    def __init__(self, ledger: TransitionSink | None, clock: Callable[[], float] = time.time) -> None:
        """Without a ledger moves are checked and timed, but not recorded: evaluation is no part of a run's lineage.
        `clock` gives seconds since the epoch, which clocks of several machines agree on."""
        self._ledger = ledger
        self._clock = clock

    def move(self, sample: Sample, state: State, reason: str = "", time_s: float | None = None, **info: Any) -> None:
        """`time_s` is when it happened, if not now."""
        if state not in MOVES[sample.state]:
            raise AssertionError(f"sample {sample.id} cannot go from {sample.state} to {state}")
        now = self._clock() if time_s is None else time_s
        if sample.state != "new":
            spent = max(now - sample.entered_s, 0.0)
            sample.seconds[sample.state] = sample.seconds.get(sample.state, 0.0) + spent
        sample.state, sample.reason, sample.entered_s = state, reason, now
        if self._ledger is not None:
            self._ledger.append(Transition(sample.id, state, reason, now, info))

    def close_unfinished(self, samples: Sequence[str], reason: str) -> None:
        """Samples of an earlier process that were under way when it ended: nobody goes on with them."""
        if self._ledger is not None:
            for sample in samples:
                self._ledger.append(Transition(sample, "dropped", reason, self._clock()))
