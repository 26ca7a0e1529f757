"""The step's loss, and its derivative by each current log-probability worked out by hand.

`step_loss` takes what stands under a stop-gradient (sg) from `frozen`, the same samples at the point where the gradient
is asked for. So a finite difference of `step_loss` with `frozen` fixed is what `step_gradient` must equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from reference.divergence import MAX_LOG_RATIO, Estimator, capped_exp, kl, kl_slope
from reference.samples import Level, RefSample, Rows, trained_tokens, unit

Name = Literal["clipped", "cispo", "topr", "sapo", "reinforce", "nll"]
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"]


@dataclass(frozen=True)
class RefLoss:
    """A loss with everything it needs to know. The KL in the loss and the entropy are off at coefficient 0."""

    name: Name
    ratio: Level = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    correction: Literal["none", "truncated", "masked"] = "none"
    correction_level: Level = "token"
    correction_low: float = 0.5
    correction_cap: float = 2.0
    kl_coef: float = 0.0
    kl_estimator: Estimator = "k3"
    entropy_coef: float = 0.0
    aggregation: Aggregation = "token_mean"
    length_normaliser: int = 1


def log_ratio(sample: RefSample, t: int, level: Level) -> float:
    """cur - prox of token t, or its mean over the turn or the sample (GSPO, arXiv 2507.18071, eq. 7)."""
    positions = unit(sample, t, level)
    return sum(sample.response_tokens[u].cur - sample.response_tokens[u].prox for u in positions) / len(positions)


def clip(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def sapo_tau(advantage: float, loss: RefLoss) -> float:
    return loss.tau_positive if advantage > 0 else loss.tau_negative


def topr_weight(sample: RefSample, advantage: float) -> float:
    """TOPR's taper (arXiv 2503.14286): 1 where the advantage is not negative, else min(1, pi(y) / mu(y))."""
    if advantage >= 0:
        return 1.0
    return min(1.0, capped_exp(sum(token.cur - token.beh for token in sample.response_tokens)))


def policy_term(sample: RefSample, t: int, advantage: float, loss: RefLoss, frozen: RefSample) -> float:
    """The loss of one token before correction, KL and entropy. rho is the ratio of `loss.ratio`'s level.

    clipped: -min(rho A, clip(rho) A) (PPO, arXiv 1707.06347, eq. 7), at most -c A of a negative A with dual_clip c
    (arXiv 1912.09729). cispo: -sg(clip(rho)) A cur (arXiv 2506.13585). topr: -sg(w) A cur (arXiv
    2503.14286). sapo: -(4 / tau) sigmoid(tau (rho - 1)) A (arXiv 2511.20347). reinforce: -A cur. nll: -cur.
    """
    cur = sample.response_tokens[t].cur
    low, high = 1 - loss.clip_low, 1 + loss.clip_high
    match loss.name:
        case "clipped":
            rho = capped_exp(log_ratio(sample, t, loss.ratio))
            gain = min(rho * advantage, clip(rho, low, high) * advantage)
            if loss.dual_clip is not None and advantage < 0:
                gain = max(gain, loss.dual_clip * advantage)
            return -gain
        case "cispo":
            frozen_rho = capped_exp(log_ratio(frozen, t, loss.ratio))
            return -clip(frozen_rho, low, high) * advantage * cur
        case "topr":
            return -topr_weight(frozen, advantage) * advantage * cur
        case "sapo":
            rho = capped_exp(log_ratio(sample, t, loss.ratio))
            tau = sapo_tau(advantage, loss)
            return -(4 / tau) * sigmoid(tau * (rho - 1)) * advantage
        case "reinforce":
            return -advantage * cur
        case "nll":
            return -cur


def policy_slope(sample: RefSample, t: int, advantage: float, loss: RefLoss) -> list[float]:
    """d policy_term / d cur_u, for every token u of the sample.

    Through rho it reaches each of the m tokens of the ratio's unit: d rho / d cur_u = rho / m, 0 where the log-ratio is
    held at 20. Of the clipped loss d / d rho is -A where the first branch of the minimum is taken, else 0: taken are
    rho <= 1 + clip_high of A > 0, and 1 - clip_low <= rho <= dual_clip of A < 0. Of SAPO, s being the sigmoid, it is
    -4 s (1 - s) A.
    """
    slope = [0.0] * len(sample.response_tokens)
    low, high = 1 - loss.clip_low, 1 + loss.clip_high
    log_rho = log_ratio(sample, t, loss.ratio)
    rho = capped_exp(log_rho)
    match loss.name:
        case "clipped" if advantage > 0:
            by_rho = -advantage if rho <= high else 0.0
        case "clipped":
            moves = low <= rho and (loss.dual_clip is None or rho <= loss.dual_clip)
            by_rho = -advantage if moves else 0.0
        case "sapo":
            s = sigmoid(sapo_tau(advantage, loss) * (rho - 1))
            by_rho = -4 * s * (1 - s) * advantage
        case "cispo":
            slope[t] = -clip(rho, low, high) * advantage
            return slope
        case "topr":
            slope[t] = -topr_weight(sample, advantage) * advantage
            return slope
        case "reinforce":
            slope[t] = -advantage
            return slope
        case "nll":
            slope[t] = -1.0
            return slope
    positions = unit(sample, t, loss.ratio)
    for u in positions:
        slope[u] = by_rho * rho / len(positions) if log_rho <= MAX_LOG_RATIO else 0.0
    return slope


def importance(sample: RefSample, t: int, level: Level) -> float:
    """e^D, D the sum of prox - beh over the token, its turn or its sample."""
    positions = unit(sample, t, level)
    return capped_exp(sum(sample.response_tokens[u].prox - sample.response_tokens[u].beh for u in positions))


def is_cut(sample: RefSample, t: int, loss: RefLoss) -> bool:
    """Whether the correction of token t is not its importance weight."""
    weight = importance(sample, t, loss.correction_level)
    match loss.correction:
        case "none":
            return False
        case "truncated":
            return weight > loss.correction_cap
        case "masked":
            return not loss.correction_low <= weight <= loss.correction_cap


def corrected(sample: RefSample, t: int, loss: RefLoss) -> float:
    """What the policy term is multiplied by, a constant: truncated importance sampling min(w, cap) (TIS), or w where
    low <= w <= cap and 0 elsewhere (IcePop, arXiv 2510.18855)."""
    if loss.correction == "none":
        return 1.0
    if is_cut(sample, t, loss):
        return loss.correction_cap if loss.correction == "truncated" else 0.0
    return importance(sample, t, loss.correction_level)


def share_cut(samples: Sequence[RefSample], loss: RefLoss) -> float:
    """The share of trained tokens whose correction was cut."""
    cuts = [is_cut(samples[i], t, loss) for i, t in trained_tokens(samples)]
    return sum(cuts) / len(cuts)


def token_weight(samples: Sequence[RefSample], i: int, loss: RefLoss) -> float:
    """What each token of sample i counts in the step's loss; S is the number of trained samples.

    token_mean: 1 / their tokens (DAPO, arXiv 2503.14476, eq. 8). sequence_mean: 1 / (S n_i) (GRPO, arXiv 2402.03300,
    eq. 3). sequence_sum: 1 / S (RLOO, arXiv 2402.14740). fixed_length: 1 / (S L) (Dr. GRPO, arXiv 2503.20783).
    """
    if not samples[i].trained:
        return 0.0
    trained = [sample for sample in samples if sample.trained]
    match loss.aggregation:
        case "token_mean":
            return 1 / sum(len(sample.response_tokens) for sample in trained)
        case "sequence_mean":
            return 1 / (len(trained) * len(samples[i].response_tokens))
        case "sequence_sum":
            return 1 / len(trained)
        case "fixed_length":
            return 1 / (len(trained) * loss.length_normaliser)


def step_loss(
    samples: Sequence[RefSample], advantages: Rows, loss: RefLoss, frozen: Sequence[RefSample] | None = None
) -> float:
    """sum of weight * (correction * policy term + kl_coef * k(cur, ref) - entropy_coef * H); 0 of an empty step."""
    total = 0.0
    for i, t in trained_tokens(samples):
        sample, token = samples[i], samples[i].response_tokens[t]
        term = policy_term(sample, t, advantages[i][t], loss, sample if frozen is None else frozen[i])
        cost = corrected(sample, t, loss) * term
        cost += loss.kl_coef * kl(token.cur, token.ref, loss.kl_estimator)
        cost -= loss.entropy_coef * token.entropy
        total += token_weight(samples, i, loss) * cost
    return total


def step_gradient(samples: Sequence[RefSample], advantages: Rows, loss: RefLoss) -> Rows:
    """d step_loss / d cur of every token; the entropy counts as a variable of its own (`entropy_gradient`)."""
    gradient = [[0.0] * len(sample.response_tokens) for sample in samples]
    for i, t in trained_tokens(samples):
        sample, token = samples[i], samples[i].response_tokens[t]
        weight = token_weight(samples, i, loss)
        for u, slope in enumerate(policy_slope(sample, t, advantages[i][t], loss)):
            gradient[i][u] += weight * corrected(sample, t, loss) * slope
        gradient[i][t] += weight * loss.kl_coef * kl_slope(token.cur, token.ref, loss.kl_estimator)
    return gradient


def entropy_gradient(samples: Sequence[RefSample], loss: RefLoss) -> Rows:
    """d step_loss / d H of every token."""
    return [
        [-loss.entropy_coef * token_weight(samples, i, loss) for _ in sample.response_tokens]
        for i, sample in enumerate(samples)
    ]
