"""Which decoding slots attend together."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.engine.cache import _CALL, DecodeRows, _slot_runs


def cost(decoding: list[DecodeRows], runs: list[range]) -> int:
    """Positions read, calls included."""
    return sum(_CALL + len(run) * max(decoding[row].length for row in run) for run in runs)


@given(rows=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 2000)), max_size=40))
@settings(max_examples=examples(200), derandomize=True, deadline=None)
def test_runs_are_consecutive_slots_and_cost_no_more_than_each_alone(rows: list[tuple[int, int]]) -> None:
    decoding, slot = [], -1
    for gap, length in rows:
        slot += gap
        decoding.append(DecodeRows(slot, length))
    runs = _slot_runs(decoding)
    assert [row for run in runs for row in run] == list(range(len(decoding)))
    for run in runs:
        slots = [decoding[row].slot for row in run]
        assert slots == list(range(slots[0], slots[0] + len(slots)))
    assert cost(decoding, runs) <= cost(decoding, [range(i, i + 1) for i in range(len(decoding))])


def test_slots_of_like_lengths_are_one_run_and_a_long_one_stands_alone() -> None:
    lengths = [300, 310, 305, 1900, 40, 42]
    assert _slot_runs([DecodeRows(i, n) for i, n in enumerate(lengths)]) == [range(3), range(3, 4), range(4, 6)]
