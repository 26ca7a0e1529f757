"""Estimates of KL(p ‖ q) from log-probs of tokens sampled from p (Schulman, 2020), for arrays and tensors."""

from __future__ import annotations

from typing import overload

import numpy as np
import torch
from torch import Tensor

from roll.algorithm.loss_inputs import Estimator
from roll.algorithm.reward_shaping import Floats

LARGEST_LOG_RATIO = 20.0
"""Larger log-ratios are clamped to this: the ratio stays finite, so that its product with an advantage of 0 is 0."""


@overload
def kl_estimate(p: Tensor, q: Tensor, estimator: Estimator) -> Tensor: ...
@overload
def kl_estimate(p: Floats, q: Floats, estimator: Estimator) -> Floats: ...
def kl_estimate(p: Tensor | Floats, q: Tensor | Floats, estimator: Estimator) -> Tensor | Floats:
    """k1 = p - q, unbiased; k2 = (p - q)² / 2; k3 = e^(q-p) - (q-p) - 1, unbiased and never negative; abs = |p - q|."""
    gap = q - p
    if estimator == "k1":
        return -gap
    if estimator == "k2":
        return gap * gap / 2
    if estimator == "abs":
        return gap.abs() if isinstance(gap, Tensor) else np.abs(gap)
    gap = gap.clamp(max=LARGEST_LOG_RATIO) if isinstance(gap, Tensor) else np.minimum(gap, LARGEST_LOG_RATIO)
    return bounded_exp(gap) - gap - 1


@overload
def bounded_exp(log_ratio: Tensor) -> Tensor: ...
@overload
def bounded_exp(log_ratio: Floats) -> Floats: ...
def bounded_exp(log_ratio: Tensor | Floats) -> Tensor | Floats:
    """e^x, at most e^20."""
    if isinstance(log_ratio, Tensor):
        return torch.exp(log_ratio.clamp(max=LARGEST_LOG_RATIO))
    return np.asarray(np.exp(np.minimum(log_ratio, LARGEST_LOG_RATIO)))
