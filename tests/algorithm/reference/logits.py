"""Log-probabilities and entropies of one position's logits, and their derivatives by the logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def log_softmax(logits: Vector, temperature: float = 1.0) -> Vector:
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    top = scaled.max()
    return np.asarray(scaled - top - np.log(np.exp(scaled - top).sum()))


def log_prob_slope(logits: Vector, token: int, temperature: float = 1.0) -> Vector:
    """d log p(token) / d logits = (onehot - p) / T."""
    onehot = np.zeros(len(logits))
    onehot[token] = 1.0
    return np.asarray((onehot - np.exp(log_softmax(logits, temperature))) / temperature)


def entropy(logits: Vector, temperature: float = 1.0) -> float:
    """H = -sum of p log p, p = softmax(logits / T)."""
    log_p = log_softmax(logits, temperature)
    return float(-(np.exp(log_p) * log_p).sum())


def entropy_slope(logits: Vector, temperature: float = 1.0) -> Vector:
    """d H / d logits = -p (log p + H) / T."""
    log_p = log_softmax(logits, temperature)
    return np.asarray(-np.exp(log_p) * (log_p + entropy(logits, temperature)) / temperature)
