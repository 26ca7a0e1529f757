"""The index against what plain Python makes of the record, after any history, kill and order of asking."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from ledger_model import check, write

from roll.config.errors import UserError
from roll.ledger import index_tables
from roll.ledger.index import Ends, LedgerBalance, Problem
from roll.run import ROLLED_BACK, Ledger, LedgerIndex, Transition

STATES = ("queued", "generating", "scored", "kept", "trained", "dropped", "failed", 'o"dd\\')
REASONS = ("", "", "stale: two versions", "stale: three", "no signal", 'odd "é": \\')
SAMPLES = ("0.0", "0.1", "1.0", "2.0", 'o"d.0', "lone")
SECONDS = (-0.5, 0.0, 0.001, 1.0, 3.0, 1000.0)
TASKS = ("a", "b", 'é"c', None)
REWARDS = (0.0, 0.5, 1, -1e-7, None)
BLOCKS = (100, 300, 1000, 2**20)

moves = st.tuples(st.just("move"), *map(st.sampled_from, (SAMPLES, STATES, REASONS, SECONDS, TASKS, REWARDS)))
histories = st.lists(
    moves
    | moves
    | moves
    | st.tuples(st.just("checkpoint"))
    | st.tuples(st.just("roll_back"), st.integers(0, 5))
    | st.tuples(st.just("kill"), st.floats(0, 1))
    | st.tuples(st.just("ask"), st.sampled_from(BLOCKS)),
    max_size=30,
)


def long_history(random: Random) -> Iterator[tuple[Any, ...]]:
    for _ in range(200):
        kind = random.choices(["move", "checkpoint", "roll_back", "kill", "ask"], [90, 4, 3, 1, 4])[0]
        if kind == "move":
            yield kind, *map(random.choice, (SAMPLES, STATES, REASONS, SECONDS, TASKS, REWARDS))
        else:
            arguments = {"roll_back": random.randrange(6), "kill": random.random(), "ask": random.choice(BLOCKS)}
            yield (kind, arguments[kind]) if kind in arguments else (kind,)


@contextmanager
def ledger_path() -> Iterator[Path]:
    with TemporaryDirectory() as directory:
        yield Path(directory) / "ledger.log"


def transition(sample: str, state: str, reason: str, time_s: float, task: str | None, reward: float | None) -> Transition:
    info: dict[str, Any] = {"queued": {"task": task, "group": 1}, "scored": {"reward": reward}}.get(state, {})
    info = {key: value for key, value in info.items() if value is not None}
    if task == "b":
        info = dict(reversed(info.items()))
    return Transition(sample, state, reason, time_s, info)


def play(history: Iterable[tuple[Any, ...]]) -> None:
    """Live through a history and, whenever it says so, ask everything."""
    with ledger_path() as path:
        ledger = Ledger.open(path)
        now, checkpoints = 1000.0, [0]
        for kind, *arguments in [*history, ("ask", 2**20)]:
            if kind == "move":
                sample, state, reason, seconds, task, reward = arguments
                now += seconds
                ledger.append(transition(sample, state, reason, now, task, reward))
            elif kind == "checkpoint":
                checkpoints.append(ledger.position)
            elif kind == "roll_back":
                ledger.roll_back(checkpoints[arguments[0] % len(checkpoints)], step=0)
            elif kind == "kill":
                ledger.close()
                os.truncate(path, int(path.stat().st_size * arguments[0]))
                ledger = Ledger.open(path)
                checkpoints = [position for position in checkpoints if position <= ledger.position]
            else:
                ledger.flush()
                with patch.object(index_tables, "BLOCK_BYTES", arguments[0]), LedgerIndex.open(path) as index:
                    check(path, index)
        ledger.close()


@settings(max_examples=examples(25), deadline=None)
@given(histories)
def test_after_any_history_it_is_what_plain_python_makes_of_the_record(history: list[tuple[Any, ...]]) -> None:
    play(history)


@pytest.mark.parametrize("seed", range(6))
def test_after_a_long_history_it_is_what_plain_python_makes_of_the_record(seed: int) -> None:
    play(long_history(Random(seed)))


def test_no_record_is_the_users_error_and_makes_no_index(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        LedgerIndex.open(tmp_path / "ledger.log")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_record_has_empty_answers(tmp_path: Path) -> None:
    path = tmp_path / "ledger.log"
    path.touch()
    with LedgerIndex.open(path, progress=lambda done, size: pytest.fail("nothing to read")) as index:
        assert index.states() == {}
        assert index.span() == (0.0, 0.0)
        assert index.balance() == LedgerBalance(Ends(0, 0, 0, 0), Ends(0, 0, 0, 0), ())
        assert index.reasons() == index.state_latencies() == index.solve_rates() == []


def test_names_that_are_near_are_proposed(path: Path) -> None:
    with LedgerIndex.open(path) as index:
        with pytest.raises(UserError, match=r"is of a task 't33'; did you mean 't3'"):
            index.task("t33")
        with pytest.raises(UserError, match=r"no sample '3,1'; did you mean '3.1'"):
            index.sample("3,1")
        with pytest.raises(UserError, match=r"of a task 'zzz'$"):
            index.task("zzz")


def test_text_that_no_database_holds_is_stored_with_a_question_mark(tmp_path: Path) -> None:
    path = tmp_path / "ledger.log"
    with Ledger.open(path) as ledger:
        ledger.append(Transition("1.0", "queued", "half \ud800", info={"task": "half \ud800"}))
        ledger.roll_back(0, step=0)
        ledger.append(Transition("1.0", "queued", "half \ud800", info={"task": "half \ud800"}))
    with LedgerIndex.open(path) as index:
        assert [(attempt.sample, attempt.reason) for attempt in index.task("half ?")] == [("1.0", "half ?")]


def test_any_value_is_a_task(tmp_path: Path) -> None:
    path = tmp_path / "ledger.log"
    write(path, [Transition("1.0", "queued", info={"task": 7}), Transition("2.0", "queued", info={"task": ""})])
    with LedgerIndex.open(path) as index:
        assert [attempt.sample for attempt in index.task("7")] == ["1.0"]
        assert [attempt.sample for attempt in index.task("")] == ["2.0"]
        assert index.balance().problems == ()


def test_times_that_are_unknown_are_in_no_stage(tmp_path: Path) -> None:
    path = tmp_path / "ledger.log"
    write(
        path, [Transition("1.0", state, time_s=s) for state, s in (("queued", 1.0), ("kept", math.nan), ("trained", 2.0))]
    )
    with LedgerIndex.open(path) as index:
        assert index.state_latencies() == []
        assert index.states() == {"trained": 1}


def test_a_sample_that_is_done_again_for_another_task_is_an_attempt_at_both(tmp_path: Path) -> None:
    path = tmp_path / "ledger.log"
    with Ledger.open(path) as ledger:
        ledger.append(Transition("1.0", "queued", time_s=1, info={"task": "first"}))
        ledger.append(Transition("1.0", "trained", time_s=2))
        ledger.roll_back(0, step=0)
        ledger.append(Transition("1.0", "queued", time_s=3, info={"task": "second"}))
        ledger.append(Transition("1.0", "trained", time_s=4))
    with LedgerIndex.open(path) as index:
        (first,), (second,) = index.task("first"), index.task("second")
        assert [step.transition.state for step in first.steps] == ["queued", "trained", ROLLED_BACK]
        assert first.state is None
        assert [step.counts for step in second.steps] == [True, True]
        assert index.balance() == LedgerBalance(Ends(1, 0, 0, 0), Ends(1, 0, 0, 0), ())


def test_trained_twice_is_a_problem_unless_it_was_undone(tmp_path: Path) -> None:
    path = tmp_path / "ledger.log"
    with Ledger.open(path) as ledger:
        for sample in ("1.0", "2.0"):
            ledger.append(Transition(sample, "queued", info={"task": "t"}))
        position = ledger.position
        ledger.append(Transition("1.0", "trained"))
        ledger.roll_back(position, step=1)
        for sample in ("1.0", "2.0", "2.0"):
            ledger.append(Transition(sample, "trained"))
    with LedgerIndex.open(path) as index:
        assert index.balance().problems == (Problem("2.0", "ended 2 times"),)
