"""Early end: which running responses are ended, and why."""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.config.errors import RunError, UserError
from roll.data import Task
from roll.rollout.early_stop import AnyOf, LengthBudget, RepetitionStop, RunningResponse, make_early_stop

tokens = st.lists(st.integers(0, 3), max_size=40)


@pytest.fixture(autouse=True)
def _path_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def running(ids: Sequence[int], siblings: Sequence[int] = ()) -> RunningResponse:
    def text() -> str:
        raise AssertionError("decoded, though nobody asked")

    return RunningResponse(Task.ask("t", "?"), np.array(ids, np.int32), text, siblings)


def repeats(ids: list[int], max_span: int, times: int, least: int) -> bool:
    """By the definition."""
    for span in range(1, max_span + 1):
        count = 1
        while ids[-span * (count + 1) : len(ids) - span * count] == ids[-span:] and len(ids) >= span * (count + 1):
            count += 1
        if len(ids) >= span and count >= times and count * span >= least:
            return True
    return False


@given(tokens, tokens, st.integers(1, 12), st.integers(1, 6), st.integers(2, 4), st.integers(0, 12))
@settings(deadline=None)
def test_a_repetition_is_found_exactly_where_there_is_one(
    head: list[int], span: list[int], count: int, max_span: int, times: int, least: int
) -> None:
    ids = head + span[:8] * count
    found = RepetitionStop(max_span, times, least)(running(ids))
    assert (found is not None) == repeats(ids, max_span, times, least)


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([5] * 63, None),
        ([5] * 64, "repetition: 1 tokens 64 times in a row"),
        ([9, *[5] * 64], "repetition: 1 tokens 64 times in a row"),
        ([*range(100), 5, 5, 5, 5], None),
        ([*range(100), *[*range(16)] * 4], "repetition: 16 tokens 4 times in a row"),
        ([*range(100), *[*range(16)] * 4, 77], None),
        ([*range(64)] * 4, "repetition: 64 tokens 4 times in a row"),
        ([*range(65)] * 9, None),
        ([*range(25)] * 3, None),
        ([], None),
    ],
)
def test_four_times_and_sixty_four_tokens_are_a_repetition(ids: list[int], reason: str | None) -> None:
    assert RepetitionStop()(running(ids)) == reason


def test_looking_for_repetition_takes_microseconds_however_long_the_response() -> None:
    ordinary = running(np.random.default_rng(0).integers(0, 50_000, 100_000).tolist())
    nearly = running([*range(1000), *([7] * 63 + [8]) * 3, *[7] * 62])
    repetition = RepetitionStop()
    for response in (ordinary, nearly):
        assert repetition(response) is None
        best = min(_seconds(lambda response=response: repetition(response)) for _ in range(20))
        assert best < 1e-3


def _seconds(call: object) -> float:
    start = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - start


@pytest.mark.parametrize(
    ("length", "siblings", "ends"),
    [
        (400, [100, 100], False),
        (401, [100, 100], True),
        (401, [100], False),
        (401, [], False),
        (401, [50, 150, 100], True),
        (401, [51, 150, 100], False),
        (63, [1, 1], False),
        (64, [1, 1], True),
    ],
)
def test_a_response_far_longer_than_its_siblings_ends(length: int, siblings: list[int], ends: bool) -> None:
    reason = LengthBudget(4)(running(range(length), siblings))
    mean = sum(siblings) / max(len(siblings), 1)
    expected = f"length budget: {length} tokens, {len(siblings)} siblings allow {4 * mean:.0f}"
    assert reason == (expected if ends else None)


def test_names_make_predicates_and_the_first_reason_counts() -> None:
    assert make_early_stop([]) is None
    assert make_early_stop(["repetition"]) == RepetitionStop()
    assert make_early_stop(["repetition=6"]) == RepetitionStop(times=6)
    assert make_early_stop(["length_budget"]) == LengthBudget(4.0)
    assert make_early_stop(["length_budget=2.5"]) == LengthBudget(2.5)
    assert make_early_stop(["repetition=2", "length_budget=1"]) == AnyOf((RepetitionStop(times=2), LengthBudget(1.0)))
    both = make_early_stop(["length_budget=2", "repetition"])
    assert both == AnyOf((LengthBudget(2.0), RepetitionStop()))
    assert both is not None
    assert both(running([1] * 70)) == "repetition: 1 tokens 64 times in a row"
    assert both(running([1] * 70, [8, 8])) == "length budget: 70 tokens, 2 siblings allow 16"
    assert both(running(range(70))) is None
    assert pickle.loads(pickle.dumps(both)) == both


USERS = """
def reason(running):
    return "gave up: " + running.text() if len(running.ids) > 2 else None

def says(running):
    return "so" in running.text()

def fails(running):
    return running.nothing

def number(running):
    return 1
"""


@pytest.fixture
def _file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ends.py").write_text(USERS)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_file")
def test_a_users_function_names_its_reason_or_says_end() -> None:
    response = RunningResponse(Task.ask("t", "?"), np.arange(3, dtype=np.int32), lambda: "so be it")
    for name, expected in (("reason", "gave up: so be it"), ("says", "ended early: by ends.py:says")):
        predicate = make_early_stop([f"ends.py:{name}"])
        assert predicate is not None
        assert predicate(response) == expected
        assert predicate(RunningResponse(response.task, response.ids[:2], lambda: "")) is None


@pytest.mark.usefixtures("_file")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fails", "the early stop 'ends.py:fails' failed on a response to task 't': AttributeError"),
        ("number", "the early stop 'ends.py:number' returned 1: return the reason"),
    ],
)
def test_a_users_function_that_fails_is_named(name: str, says: str) -> None:
    predicate = make_early_stop([f"ends.py:{name}"])
    assert predicate is not None
    with pytest.raises(RunError, match=says):
        predicate(running([1]))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("repetitions", "rollout.early_stop 'repetitions' is not known: write .*; did you mean 'repetition'"),
        ("repetition=1", "'repetition=1' needs a whole number of at least 2: write 'repetition=4'"),
        ("repetition=2.5", "'repetition=2.5' needs a whole number"),
        ("repetition=inf", "'repetition=inf' needs a whole number"),
        ("length_budget=0.5", "'length_budget=0.5' needs a number of at least 1: write 'length_budget=4'"),
        ("length_budget=", "'length_budget=' needs a number"),
        ("length_budget=nan", "'length_budget=nan' needs a number"),
        ("length_budget=long", "'length_budget=long' needs a number"),
        ("absent.py:f", "rollout.early_stop 'absent.py:f': there is no file"),
    ],
)
def test_names_that_cannot_be_are_refused(name: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        make_early_stop(["repetition", name])
