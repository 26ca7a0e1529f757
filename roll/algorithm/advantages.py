"""From scores to advantages: baselines, scales, and comparison of turns that start in the same state. Pure functions.

Invariants: samples are compared only within their own group, batch or domain; if scores have zero variance there is no
signal, and the advantage is exactly 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll.algorithm.reward_shaping import Floats
from roll.data.remote_columns import Indices

STD_FLOOR = 1e-6
"""Scores with a smaller standard deviation count as equal: it is only the rounding of fp32 log-probs and rewards."""


def index_of(keys: NDArray[Any]) -> Indices:
    """Maps each key to an index, counted from 0."""
    return np.asarray(np.unique(keys, return_inverse=True)[1], np.int64).reshape(-1)


def mean_within(values: Floats, which: Indices) -> Floats:
    """For each value, the mean of the values with the same index.

    It is computed as the first value plus the mean difference from it, so that the mean of equal values is exactly that
    value.
    """
    counts = np.bincount(which)
    first = np.zeros(len(counts))
    first[which[::-1]] = values[::-1]  # of several assignments to one index the last one stays
    mean_difference = np.bincount(which, weights=values - first[which]) / np.maximum(counts, 1)
    return np.asarray((first + mean_difference)[which])


def std_within(values: Floats, which: Indices) -> Floats:
    """For each value, the standard deviation (n - 1) of the values with the same index; 0 for a single one."""
    centred = values - mean_within(values, which)
    counts = np.bincount(which)
    return np.asarray(np.sqrt(np.bincount(which, weights=centred**2) / np.maximum(counts - 1, 1))[which])


def leave_one_out(values: Floats, which: Indices) -> Floats:
    """For each value, the mean of the others with the same index; the value itself if there is no other."""
    counts = np.bincount(which)[which]
    others = np.bincount(which, weights=values)[which] - values
    return np.asarray(np.where(counts > 1, others / np.maximum(counts - 1, 1), values))


def without_noise(centred: Floats, std: Floats) -> Floats:
    """Sets values without variance to 0."""
    return np.asarray(np.where(std > STD_FLOOR, centred, 0.0))


def scaled(centred: Floats, std: Floats) -> Floats:
    """centred / spread, and 0 if there is no variance."""
    return without_noise(centred, std) / np.maximum(std, STD_FLOOR)


def whitened(values: Floats) -> Floats:
    """The values normalised to mean 0 and standard deviation (n - 1) 1; zeros if they have no variance, or if there is
    only one."""
    together = np.zeros(len(values), np.int64)
    return scaled(values - mean_within(values, together), std_within(values, together))


def group_relative(scores: NDArray[Any], groups: NDArray[Any], scale_by_std: bool) -> Floats:
    """Each score minus its group's mean, optionally divided by the group's standard deviation."""
    values, which = np.asarray(scores, np.float64), index_of(groups)
    centred, std = values - mean_within(values, which), std_within(values, which)
    return scaled(centred, std) if scale_by_std else without_noise(centred, std)


def returns_of(rewards: NDArray[Any], offsets: Indices, discount: float) -> Floats:
    """Discounted sums from each entry to the end of its row; row i is `offsets[i]:offsets[i + 1]`.

    Rewards 1 and 4 with a discount of 0.5 have the returns 3 and 4. All rows are processed backwards together, the
    longest first.
    """
    sums = np.asarray(rewards, np.float64).copy()
    if discount == 0.0:
        return sums
    lengths = np.diff(offsets)
    order = np.argsort(-lengths, kind="stable")
    ends, longest = offsets[1:][order] - 1, lengths[order]
    for back in range(1, int(longest[0]) if len(longest) else 0):
        positions = ends[: int(np.searchsorted(-longest, -back))] - back
        sums[positions] += discount * sums[positions + 1]
    return sums


def turn_relative(returns: Floats, states: NDArray[Any], groups: NDArray[Any], scale_by_std: bool) -> Floats:
    """Each turn's return relative to those of all turns of its group that started in the same state (GiGPO).

    A state that occurs once in its group gives 0.
    """
    both = np.stack([index_of(groups), index_of(states)], axis=1)
    pairs = np.unique(both, axis=0, return_inverse=True)[1].reshape(-1)
    return group_relative(returns, pairs, scale_by_std)
