"""The life of a sample: its states, the moves between them, and the ledger that records every move.

    queued → generating → scoring → scored → kept → trained
                 │            │         └→ dropped   (its group was filtered, or a sibling was needed and failed)
                 └────────────┴→ failed              (it could not be generated or judged)

What always holds: a move that is not in the table is a bug and raises; every move is on the ledger with its reason.
"""

from __future__ import annotations

import time
from typing import Any, Literal, Protocol

from roll.data.sample import Sample
from roll.run.ledger import Transition

State = Literal["queued", "generating", "scoring", "scored", "kept", "trained", "dropped", "failed"]

MOVES: dict[str, frozenset[str]] = {
    "new": frozenset({"queued"}),
    "queued": frozenset({"generating", "dropped"}),
    "generating": frozenset({"scoring", "failed", "dropped"}),
    "scoring": frozenset({"scored", "failed", "dropped"}),
    "scored": frozenset({"kept", "dropped"}),
    "kept": frozenset({"trained", "dropped"}),
    "trained": frozenset(),
    "dropped": frozenset(),
    "failed": frozenset(),
}


class Record(Protocol):
    """Where moves are written: the run's ledger, or a report to the one who keeps it."""

    def append(self, transition: Transition) -> None: ...


class Lifecycle:
    """Moves samples from state to state and writes them down."""

    def __init__(self, ledger: Record | None) -> None:
        """Without a ledger moves are checked and timed, but not recorded: evaluation is no part of a run's lineage."""
        self._ledger = ledger

    def move(self, sample: Sample, state: State, reason: str = "", **info: Any) -> None:
        if state not in MOVES[sample.state]:
            raise AssertionError(f"sample {sample.id} cannot go from {sample.state} to {state}")
        now = time.monotonic()
        if sample.state != "new":
            sample.seconds[sample.state] = now - sample.entered_s
        sample.state, sample.reason, sample.entered_s = state, reason, now
        if self._ledger is not None:
            self._ledger.append(Transition(sample.id, state, reason, info=info))
