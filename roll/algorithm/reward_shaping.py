"""Reward shaping before samples are compared: pure functions over sample columns."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def shaped(rewards: NDArray[Any], bounds: tuple[float, float] | None, scale: float, shift: float) -> Floats:
    """scale · clip(reward, bounds) + shift."""
    values = np.asarray(rewards, np.float64)
    return np.asarray(scale * (values if bounds is None else np.clip(values, *bounds)) + shift)


def turn_factors(rewards: NDArray[Any], bounds: tuple[float, float] | None, scale: float) -> Floats:
    """Factors for the turn rewards of samples with these rewards, so that each turn keeps its share of a reward that is
    clipped and scaled: turns of 2, 0 and 1 with a clip at 1 become two thirds, 0 and a third."""
    values = np.asarray(rewards, np.float64)
    clipped = values if bounds is None else np.clip(values, *bounds)
    share = np.divide(clipped, values, out=np.ones(len(values)), where=values != 0)
    return np.asarray(scale * np.maximum(share, 0.0))


def overlong(lengths: NDArray[Any], longest: int | NDArray[Any], buffer: float | NDArray[Any]) -> Floats:
    """0 up to `longest - buffer` tokens, then falling linearly to -1 at `longest`.

    With `longest` 100 and a buffer of 20, responses of 80, 90 and 100 tokens get 0, -0.5 and -1.
    """
    return np.asarray(np.clip((longest - buffer - np.asarray(lengths, np.float64)) / buffer, -1.0, 0.0))


def too_easy_or_hard(rewards: NDArray[Any], groups: NDArray[Any], bounds: tuple[float, float]) -> NDArray[np.bool_]:
    """Which samples belong to a group whose mean reward is outside the bounds."""
    _, which = np.unique(groups, return_inverse=True)
    means = np.bincount(which, weights=rewards) / np.bincount(which)
    outside = (means < bounds[0]) | (means > bounds[1])
    return np.asarray(outside[which])
