"""How rewards become advantages: pure functions over sample columns."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

STD_FLOOR = 1e-6


def group_relative(rewards: NDArray[Any], groups: NDArray[Any], scale_by_std: bool) -> NDArray[np.float64]:
    """Each reward minus its group's mean, optionally divided by the group's standard deviation (n - 1).

    A group whose rewards are all equal, or of one sample, gets zeros.
    """
    _, which = np.unique(groups, return_inverse=True)
    counts = np.bincount(which).astype(np.float64)
    means = np.bincount(which, weights=rewards) / counts
    centred = np.asarray(rewards, np.float64) - means[which]
    # A mean of equal numbers may be off by a rounding; a group without spread has no signal, not a tiny one.
    spread = np.sqrt(np.bincount(which, weights=centred**2) / np.maximum(counts - 1, 1))
    centred = np.where(spread[which] > STD_FLOOR, centred, 0.0)
    return np.asarray(centred / np.maximum(spread[which], STD_FLOOR) if scale_by_std else centred)
