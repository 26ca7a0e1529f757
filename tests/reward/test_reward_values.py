"""What a reward function may return."""

from __future__ import annotations

import math
import pickle
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.reward.base import ScoreFailure, Verdict, normalise

small = st.floats(-1e3, 1e3)


@pytest.mark.parametrize(
    ("result", "reward"),
    [
        (1, 1.0),
        (0.25, 0.25),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.True_, 1.0),
        (np.array(2.0), 2.0),
        (Decimal("1.5"), 1.5),
        (Fraction(1, 2), 0.5),
    ],
)
def test_a_number_is_the_reward(result: object, reward: float) -> None:
    assert normalise(result) == Verdict(reward, {})


@given(st.dictionaries(st.text().filter(lambda name: name != "reward"), small, min_size=1, max_size=99), small)
def test_parts_are_summed_unless_the_reward_is_named(parts: dict[str, float], reward: float) -> None:
    assert normalise(parts) == Verdict(sum(parts.values()), parts)
    assert normalise({**parts, "reward": reward}) == Verdict(reward, parts)


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (None, "is a `return` missing"),
        ("1.0", r"'1.0' \(str\), not a number"),
        ((1.0, 2.0), "tuple"),
        (1j, "complex"),
        (math.nan, "nan, not a finite number"),
        (-math.inf, "-inf, not a finite number"),
        (10**400, "not one number"),
        (np.zeros(2), "not one number"),
        ({}, "empty mapping"),
        ({"a": math.nan}, "as 'a', nan"),
        ({"a": "x"}, "as 'a', 'x'"),
        ({1: 1.0}, "a part named 1"),
        (1e308, r"returned 1e\+308, but a reward is from -1e\+06 to 1e\+06"),
        (-1e200, r"returned -1e\+200, but a reward"),
        (1_000_001, r"1e\+06, but a reward"),
        ({"reward": 1e308}, r"as 'reward', 1e\+308, but"),
        ({"a": 1e308, "reward": 0}, r"as 'a', 1e\+308, but a number beside a reward"),
        ({"a": 6e5, "b": 6e5}, r"sum to 1.2e\+06, but a reward"),
        ("x" * 1000, "…"),
    ],
)
def test_anything_else_is_refused_by_name(result: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        normalise(result)


@pytest.mark.parametrize("largest", [1e6, -1e6])
def test_the_largest_rewards_are_taken(largest: float) -> None:
    assert normalise(largest).reward == largest
    assert normalise({"reward": largest, "bytes": 1e30}).parts == {"bytes": 1e30}


def test_a_coroutine_is_refused_without_a_warning_about_it(recwarn: pytest.WarningsRecorder) -> None:
    async def reward() -> float:
        return 1.0

    with pytest.raises(ValueError, match="write `def`"):
        normalise(reward())
    assert not recwarn.list


def test_a_failure_reads_as_one_line_and_travels() -> None:
    failure = pickle.loads(pickle.dumps(ScoreFailure("raised", "KeyError: 'x'", "Traceback …")))
    assert (str(failure), failure.kind, failure.detail) == ("raised: KeyError: 'x'", "raised", "Traceback …")
