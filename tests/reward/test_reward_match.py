"""Exact, fuzzy and numeric match."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.data import Response, Task
from roll.reward.match import Exact, Fuzzy, likeness_by_characters, likeness_by_words
from roll.reward.numbers import Number


def judged(reward: Any, answer: Any, text: str) -> float:
    return float(reward(Task.ask("t", "?", answer), Response(text, 1, "stop")))


@pytest.mark.parametrize(
    ("options", "answer", "text", "value"),
    [
        ({}, "New York", "New York", 1),
        ({}, "New York", "  New\n York ", 1),
        ({}, "New York", "new york", 0),
        ({}, "New York", "New York.", 0),
        ({"ignore_case": True}, "New York", "NEW YORK", 1),
        ({"ignore_punctuation": True}, "New York", "New York!", 1),
        ({"find": "last_line"}, "Rome", "Let me see.\nRome\n\n", 1),
        ({"find": "boxed"}, "Rome", r"\boxed{Paris} \boxed{Rome}", 1),
        ({"find": "boxed"}, "Rome", "Rome", 0),
        ({"find": "answer"}, "Rome", "<answer>Paris</answer><answer> Rome </answer>!", 1),
        ({"find": "answer"}, "Rome", "<answer>Rome", 0),
        ({"pattern": r"is (\w+)"}, "Rome", "It is Paris, no, it is Rome!", 1),
        ({"pattern": r"\w+$"}, "Rome", "It is Rome", 1),
        ({"pattern": "x"}, "Rome", "Rome", 0),
        ({"find": "last_line", "pattern": r"A: (.*)"}, "Rome", "A: Paris\nA: Rome", 1),
        ({}, 5, "5", 1),
        ({}, ["Rome", "Roma"], "Roma", 1),
        ({}, ["Rome", "Roma"], "Paris", 0),
        ({}, "", " ", 1),
    ],
)
def test_exact(options: dict[str, Any], answer: Any, text: str, value: float) -> None:
    assert judged(Exact(**options), answer, text) == value


def test_a_task_without_an_answer_is_refused() -> None:
    for answer in (None, [], [None]):
        with pytest.raises(ValueError, match="task 't' has no answer"):
            judged(Exact(), answer, "x")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"find": "somewhere"}, "find is 'somewhere', but takes stated, text, last_line, boxed, answer"),
        ({"pattern": "("}, "pattern '\\(' is not a regular expression"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Exact(**options)
    with pytest.raises(ValueError, match=says):
        Fuzzy(**options)


words = st.lists(st.sampled_from(["a", "b", "c"])).map(" ".join)


@given(words, words)
def test_likeness_is_symmetric_bounded_and_one_for_the_same(a: str, b: str) -> None:
    for measure in (likeness_by_words, likeness_by_characters):
        assert 0 <= measure(a, b) <= 1
        assert measure(a, a) == 1
    assert likeness_by_words(a, b) == likeness_by_words(b, a)
    assert (likeness_by_words(a, b) == 1) == (sorted(a.split()) == sorted(b.split()))


def test_fuzzy() -> None:
    assert judged(Fuzzy(), "the red fox", "The red, red fox!") == pytest.approx(6 / 7)
    assert judged(Fuzzy(), ["a b", "c d"], "c d") == 1
    assert judged(Fuzzy(), "a b", "c d") == 0
    assert judged(Fuzzy(by="characters"), "abcd", "abxd") == pytest.approx(0.75)
    assert judged(Fuzzy(threshold=0.9), "the red fox", "the red, red fox") == 0
    assert judged(Fuzzy(threshold=0.5, all_or_nothing=True), "the red fox", "the red, red fox") == 1
    assert judged(Fuzzy(find="answer"), "a", "no tag") == 0
    with pytest.raises(ValueError, match="write a threshold"):
        Fuzzy(all_or_nothing=True)
    with pytest.raises(ValueError, match="threshold is 2"):
        Fuzzy(threshold=2)


@pytest.mark.parametrize(
    ("options", "text", "value"),
    [
        ({}, "100.1", 0),
        ({"tolerance": 0.1}, "100.1", 1),
        ({"tolerance": 0.1}, "100.11", 0),
        ({"relative": 0.01}, "-99", 0),
        ({"relative": 0.01}, "99", 1),
        ({"relative": 0.01}, "101.1", 0),
        ({"relative": 0.01, "tolerance": 5}, "105", 1),
        ({"tolerance": 5}, "none", 0),
    ],
)
def test_a_number_may_be_off_by_a_tolerance(options: dict[str, Any], text: str, value: float) -> None:
    assert judged(Number(**options), 100, text) == value
