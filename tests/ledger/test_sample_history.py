"""Which records of a sample count, by example; `test_ledger_index` has every history."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from roll.config.errors import RunError
from roll.ledger.sample_history import group_of, history_of, read_records
from roll.run import ROLLED_BACK, Transition


def test_what_was_undone_does_not_count_and_what_it_was_for_is_told_all_the_same() -> None:
    records = [
        (0, Transition("1.0", "queued", info={"task": "a"})),
        (100, Transition("1.0", "trained")),
        (200, Transition("1.0", ROLLED_BACK, info={"position": 100})),
        (300, Transition("1.0", "dropped", "stale")),
        (400, Transition("1.0", ROLLED_BACK, info={"position": 0})),
        (500, Transition("1.0", "queued", info={"task": "b"})),
    ]
    steps = history_of(records)
    assert [step.counts for step in steps] == [False, False, False, False, False, True]
    assert [step.task for step in steps] == ["a", "a", "a", "a", "a", "b"]
    assert [step.counts for step in history_of(records[:4])] == [True, False, False, True]


def test_a_record_that_was_changed_meanwhile_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "ledger.log"
    path.write_bytes(Transition("1.0", "queued", time_s=1.0).encode())
    with path.open("rb") as file:
        assert read_records(file, path, struct.pack("<q", 0)) == [(0, Transition("1.0", "queued", time_s=1.0))]
        with pytest.raises(RunError, match="was changed while it was read: ask again"):
            read_records(file, path, struct.pack("<q", 3))


def test_the_group_is_in_the_name() -> None:
    assert [group_of(name) for name in ("17.3", "a.b.0", "lone")] == ["17", "a.b", "lone"]
