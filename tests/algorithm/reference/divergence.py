"""How far two policies are apart, from the log-probabilities of tokens drawn from the first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from reference.samples import RefSample, trained_tokens

Estimator = Literal["k1", "k2", "k3", "abs"]

MAX_LOG_RATIO = 20.0


def capped_exp(log_ratio: float) -> float:
    """e^x with x at most 20."""
    return math.exp(min(log_ratio, MAX_LOG_RATIO))


def kl(p: float, q: float, estimator: Estimator) -> float:
    """An estimate of KL(p || q) from one token drawn from p (Schulman, "Approximating KL Divergence", 2020).

    k1 = p - q; k2 = (p - q)^2 / 2; k3 = e^(q - p) - (q - p) - 1; abs = |p - q|. In k3, q - p counts as 20 at most.
    """
    match estimator:
        case "k1":
            return p - q
        case "k2":
            return (p - q) ** 2 / 2
        case "k3":
            return capped_exp(q - p) - min(q - p, MAX_LOG_RATIO) - 1
        case "abs":
            return abs(p - q)


def kl_slope(p: float, q: float, estimator: Estimator) -> float:
    """d kl / d p. Of |p - q| at 0, and of k3 where q - p is held at 20, it is 0."""
    match estimator:
        case "k1":
            return 1.0
        case "k2":
            return p - q
        case "k3":
            return 1 - math.exp(q - p) if q - p <= MAX_LOG_RATIO else 0.0
        case "abs":
            return float(p > q) - float(p < q)


def adapted_coefficient(coef: float, observed: float, *, target: float, samples: int, horizon: float) -> float:
    """The coefficient after a step that saw `observed` (arXiv 1909.08593).

    e = clip(observed / target - 1, -0.2, 0.2); coef (1 + e samples / horizon).
    """
    error = observed / target - 1
    error = max(-0.2, min(0.2, error))
    return coef * (1 + error * samples / horizon)


@dataclass(frozen=True)
class Mismatch:
    """Trainer against sampler over the trained tokens, D = prox - beh."""

    mean_abs: float
    max_abs: float
    k3: float
    ess: float


def mismatch(samples: Sequence[RefSample]) -> Mismatch:
    """mean |D|; max |D|; mean(e^D - D - 1), an estimate of KL(beh || prox); (sum e^D)^2 / (N sum e^2D).

    The last is Kish's effective sample size as a share of N. It takes at least one trained token.
    """
    gaps = []
    for i, t in trained_tokens(samples):
        token = samples[i].response_tokens[t]
        gaps.append(token.prox - token.beh)
    ratios = [capped_exp(gap) for gap in gaps]
    return Mismatch(
        mean_abs=sum(abs(gap) for gap in gaps) / len(gaps),
        max_abs=max(abs(gap) for gap in gaps),
        k3=sum(kl(0.0, gap, "k3") for gap in gaps) / len(gaps),
        ess=sum(ratios) ** 2 / (len(gaps) * sum(ratio**2 for ratio in ratios)),
    )
