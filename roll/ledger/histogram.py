"""A histogram of seconds with logarithmic buckets: it fits in a few table rows and gives quantiles within `PRECISION`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

PRECISION = 0.01
"""Relative error of quantiles."""
_LOG_WIDTH = 2 * math.log1p(PRECISION)
_NO_TIME = -(2**31)


def buckets(values: list[float]) -> Iterator[tuple[int, int, float, float]]:
    """Each non-empty bucket with its count, its sum and its maximum in seconds; negative values count as zero."""
    import numpy as np

    seconds = np.maximum(np.array(values), 0.0)
    buckets = np.full(len(seconds), _NO_TIME)
    timed = seconds > 0
    buckets[timed] = np.rint(np.log(seconds[timed]) / _LOG_WIDTH)
    found, which = np.unique(buckets, return_inverse=True)
    longest = np.zeros(len(found))
    np.maximum.at(longest, which, seconds)
    columns = (found, np.bincount(which), np.bincount(which, seconds), longest)
    return zip(*(column.tolist() for column in columns), strict=True)


def quantile(counts: Sequence[tuple[int, int]], part: float) -> float:
    """The nearest-rank quantile of (bucket, count) pairs in the order of their buckets."""
    rank = math.ceil(part * sum(times for _, times in counts))
    seen = accumulate(times for _, times in counts)
    bucket = next(bucket for (bucket, _), up_to in zip(counts, seen, strict=True) if up_to >= rank)
    return 0.0 if bucket == _NO_TIME else math.exp(bucket * _LOG_WIDTH)
