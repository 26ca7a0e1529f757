"""The moves of a sample: those in the table, and no others; each of them on the ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from rollout_toys import Moves

from roll.data import Sample, Task
from roll.ledger.log import Ledger
from roll.rollout.lifecycle import ENDS, MOVES, Lifecycle, State

STATES = [state for state in MOVES if state != "new"]


def sample(state: str = "new", id: str = "0.0") -> Sample:
    return Sample(id, Task.ask("t", "?"), 0, 1.0, state=state)


def lifecycle(ledger: Any) -> Lifecycle:
    return Lifecycle(ledger)


def test_every_state_of_the_table_can_be_reached_and_left_only_for_states_of_the_table() -> None:
    assert set().union(*MOVES.values()) == set(STATES)
    reached, frontier = {"new"}, {"new"}
    while frontier:
        frontier = set().union(*(MOVES[state] for state in frontier)) - reached
        reached |= frontier
    assert reached == set(MOVES)
    assert [state for state in STATES if not MOVES[state]] == ["trained", "dropped"]
    assert MOVES["failed"] == {"queued"}  # while tries are left
    assert {state for state in STATES if MOVES[state] <= {"queued"}} == ENDS
    assert set(get_args(State)) == set(STATES)


@pytest.mark.parametrize("state", ["queued", "generating", "paused", "acting", "scoring"])
def test_whoever_works_on_a_sample_may_lose_fail_or_drop_it(state: str) -> None:
    assert MOVES[state] >= {"failed", "dropped"}
    assert state == "queued" or "queued" in MOVES[state]


@pytest.mark.parametrize("old", MOVES)
@pytest.mark.parametrize("new", STATES)
def test_a_move_is_in_the_table_or_raises(old: str, new: Any) -> None:
    moves = Moves()
    subject = sample(old)
    life = lifecycle(moves)
    if new in MOVES[old]:
        life.move(subject, new, "why")
        assert (subject.state, subject.reason) == (new, "why")
        assert [(r.sample, r.state, r.reason) for r in moves.records] == [("0.0", new, "why")]
    else:
        with pytest.raises(AssertionError, match=rf"sample 0\.0 cannot go from {old} to {new}"):
            life.move(subject, new, "why")
        assert (subject.state, subject.reason) == (old, "")
        assert moves.records == []


@given(data=st.data())
@settings(max_examples=examples(40), derandomize=True, deadline=None)
def test_any_walk_is_on_the_ledger_in_order(data: st.DataObject) -> None:
    moves = Moves()
    life = lifecycle(moves)
    subjects = [sample(id=str(i)) for i in range(3)]
    walked: dict[str, list[str]] = {subject.id: [] for subject in subjects}
    for _ in range(20):
        subject = data.draw(st.sampled_from(subjects))
        if not MOVES[subject.state]:
            continue
        state: Any = data.draw(st.sampled_from(sorted(MOVES[subject.state])))
        life.move(subject, state)
        walked[subject.id].append(state)
    for subject in subjects:
        assert moves.of(subject.id) == walked[subject.id]
        assert set(subject.seconds) == set(walked[subject.id][:-1])
        assert all(seconds >= 0 for seconds in subject.seconds.values())


def test_moves_survive_in_the_run_folders_ledger(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger") as ledger:
        life = Lifecycle(ledger)
        subject = sample()
        life.move(subject, "queued", task="t", group=0)
        life.move(subject, "generating")
        life.move(subject, "failed", "too long")
    records = list(Ledger.read(tmp_path / "ledger"))
    assert [(r.sample, r.state, r.reason) for r in records] == [
        ("0.0", "queued", ""),
        ("0.0", "generating", ""),
        ("0.0", "failed", "too long"),
    ]
    assert records[0].info == {"task": "t", "group": 0}


def test_without_a_ledger_moves_are_still_checked() -> None:
    subject = sample()
    Lifecycle(None).move(subject, "queued")
    with pytest.raises(AssertionError):
        Lifecycle(None).move(subject, "scored")


def test_a_move_is_timed_by_the_clock_or_by_who_saw_it() -> None:
    moves: Any = Moves()
    now = 100.0
    life, subject = Lifecycle(moves, clock=lambda: now), sample()
    life.move(subject, "queued")
    life.move(subject, "generating", time_s=103.5)
    now = 104.0
    life.move(subject, "queued")
    life.move(subject, "generating", time_s=103.0)  # clocks of two machines may differ a little
    life.move(subject, "failed", time_s=110.0)
    assert subject.seconds == {"queued": 3.5, "generating": 0.5 + 7.0}
    assert [record.time_s for record in moves.records] == [100.0, 103.5, 104.0, 103.0, 110.0]
    assert subject.entered_s == 110.0


@pytest.mark.parametrize("old", ["new", "scored", "kept"])
def test_samples_move_together_as_one_by_one_at_one_time(old: str) -> None:
    one, all_ = Moves(), Moves()
    times = iter([5.0, 6.0])
    alone, together = ([sample(old, f"0.{i}") for i in range(3)] for _ in range(2))
    life: Any = Lifecycle(cast(Any, one))
    for subject in alone:
        life.move(subject, sorted(MOVES[old])[0], "why", time_s=5.0, version=2)
    life = Lifecycle(cast(Any, all_), clock=lambda: next(times))
    life.move_all(iter(together), sorted(MOVES[old])[0], "why", version=2)
    assert all_.records == one.records
    ways = [[(s.id, s.state, s.reason, s.entered_s, s.seconds) for s in subjects] for subjects in (alone, together)]
    assert ways[1] == ways[0]
    assert next(times) == 6.0, "the clock is read once"


def test_a_move_together_ends_at_the_first_sample_that_cannot_move() -> None:
    moves: Any = Moves()
    subjects = [sample("scored", "0.0"), sample("trained", "0.1"), sample("scored", "0.2")]
    with pytest.raises(AssertionError, match=r"sample 0\.1 cannot go from trained to kept"):
        Lifecycle(moves).move_all(subjects, "kept")
    assert [subject.state for subject in subjects] == ["kept", "trained", "scored"]
    assert [record.sample for record in moves.records] == ["0.0"]


def test_samples_of_an_earlier_process_are_dropped_by_name() -> None:
    moves: Any = Moves()
    Lifecycle(moves, clock=lambda: 5.0).close_unfinished(["3.0", "3.1"], "resumed")
    records = [(r.sample, r.state, r.reason, r.time_s) for r in moves.records]
    assert records == [("3.0", "dropped", "resumed", 5.0), ("3.1", "dropped", "resumed", 5.0)]
    Lifecycle(None).close_unfinished(["3.0"], "resumed")
