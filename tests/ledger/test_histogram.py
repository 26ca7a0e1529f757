"""Quantiles of a histogram of seconds, against those of the seconds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.ledger.histogram import PRECISION, buckets, quantile

seconds = st.floats(-1.0, 1e6) | st.sampled_from([0.0, 1e-9, 1.0])


@given(st.lists(seconds, min_size=1), st.floats(0.01, 1.0))
def test_it_tells_the_count_the_sum_the_longest_and_every_quantile(values: list[float], part: float) -> None:
    rows = list(buckets(values))
    timed = sorted(max(0.0, value) for value in values)
    assert sum(times for _, times, _, _ in rows) == len(timed)
    assert sum(total for _, _, total, _ in rows) == pytest.approx(sum(timed))
    assert max(longest for *_, longest in rows) == timed[-1]
    nearest = timed[math.ceil(part * len(timed)) - 1]
    found = quantile([(bucket, times) for bucket, times, _, _ in rows], part)
    assert found == pytest.approx(nearest, rel=PRECISION * 1.0001, abs=0)
