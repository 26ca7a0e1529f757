"""Shaping by length and repetition."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.data import Response, Task
from roll.reward.length import Length
from roll.reward.repetition import RepetitionPenalty, repeated_share

TASK = Task.ask("t", "?")
sizes = st.integers(0, 300)


def of_tokens(tokens: int, **options: Any) -> float:
    return Length(**options)(TASK, Response("", tokens, "stop"))


@pytest.mark.parametrize(
    ("options", "tokens", "value"),
    [
        ({"target": 10}, 10, 1),
        ({"target": 10}, 5, 0.5),
        ({"target": 10}, 0, 0),
        ({"target": 10}, 15, 0.5),
        ({"target": 10, "ramp": 2}, 11, 0.5),
        ({"target": 10, "ramp": 2}, 30, 0),
        ({"budget": 10}, 10, 1),
        ({"budget": 10}, 11, 0),
        ({"budget": 10, "ramp": 4}, 11, 0.75),
        ({"budget": 10, "ramp": 4}, 14, 0),
        ({"overlong": 100, "ramp": 20}, 80, 0),
        ({"overlong": 100, "ramp": 20}, 90, -0.5),
        ({"overlong": 100, "ramp": 20}, 100, -1),
        ({"overlong": 100, "ramp": 20}, 300, -1),
        ({"overlong": 100}, 99, 0),
        ({"overlong": 100}, 100, -1),
    ],
)
def test_lengths(options: dict[str, Any], tokens: int, value: float) -> None:
    assert of_tokens(tokens, **options) == value


@given(sizes, sizes, st.integers(1, 50), st.integers(0, 50))
def test_longer_is_never_better_beyond_a_budget_or_before_an_overlong_end(a: int, b: int, bound: int, ramp: int) -> None:
    shorter, longer = min(a, b), max(a, b)
    for way in ({"budget": bound, "ramp": ramp}, {"overlong": bound, "ramp": min(ramp, bound)}):
        assert of_tokens(shorter, **way) >= of_tokens(longer, **way)
    assert 0 <= of_tokens(a, budget=bound, ramp=ramp) <= 1
    assert -1 <= of_tokens(a, overlong=bound, ramp=min(ramp, bound)) <= 0
    assert 0 <= of_tokens(a, target=bound, ramp=ramp) <= 1


def test_units() -> None:
    response = Response("two  words", 7, "stop")
    for unit, size in (("tokens", 7), ("words", 2), ("characters", 10)):
        assert Length(target=size, ramp=1, unit=unit)(TASK, response) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "one of target, budget and overlong, and got none"),
        ({"target": 1, "budget": 2}, "and got target and budget"),
        ({"target": -1}, "target is -1"),
        ({"overlong": 5, "ramp": 6}, "more than overlong=5"),
    ],
)
def test_lengths_that_cannot_work_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Length(**options)


items = st.lists(st.sampled_from("abc"), max_size=12)


@given(items, st.integers(1, 4))
def test_repeated_grams_are_those_that_stood_before(words: list[str], n: int) -> None:
    grams = [words[i : i + n] for i in range(len(words)) if i + n <= len(words)]
    again = [gram in grams[:i] for i, gram in enumerate(grams)]
    assert repeated_share(words, n) == pytest.approx(sum(again) / len(again) if again else 0)


@given(items, st.integers(1, 4))
def test_what_is_said_again_counts_as_repeated_whole(words: list[str], n: int) -> None:
    """Only the n-grams across the seam may be new."""
    once, twice = (max(0, times * len(words) - n + 1) for times in (1, 2))
    new = (1 - repeated_share(words, n)) * once
    assert (1 - repeated_share(words * 2, n)) * twice <= new + max(0, twice - 2 * once) + 1e-9
    assert 0 <= repeated_share(words, n) < 1


def penalty(text: str, **options: Any) -> float:
    return RepetitionPenalty(**options)(TASK, Response(text, 1, "stop"))


def test_repetition() -> None:
    assert penalty("a b c d e f g") == 0
    assert penalty("a b a b a", n=2) == -0.5
    assert penalty("A b, a B. a", n=2) == -0.5
    assert penalty("a b a b a", n=2, allowed=0.5) == 0
    assert penalty("a b a b a", n=2, allowed=0.4) == -0.5
    assert penalty("short") == 0
    assert penalty("好好好好", n=1, unit="characters") == -0.75
    for options in ({"n": 0}, {"allowed": 2}):
        with pytest.raises(ValueError, match="but takes"):
            RepetitionPenalty(**options)  # type: ignore[arg-type]
