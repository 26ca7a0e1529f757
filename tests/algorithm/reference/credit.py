"""From a sample's score to an advantage for each of its tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from reference.divergence import Estimator, kl
from reference.samples import RefSample, Rows, trained_tokens

Policy = Literal["prox", "beh"]


def token_kl(sample: RefSample, estimator: Estimator, policy: Policy) -> list[float]:
    return [kl(token.prox if policy == "prox" else token.beh, token.ref, estimator) for token in sample.response_tokens]


def credit_sample(sample: RefSample, advantage: float) -> list[float]:
    """Every token gets the sample's advantage (GRPO, arXiv 2402.03300, section 4.1.2)."""
    return [advantage for _ in sample.response_tokens]


def credit_turns(sample: RefSample, turn_advantage: Sequence[float]) -> list[float]:
    """Every token gets its turn's advantage (GiGPO, arXiv 2505.10978)."""
    return [turn_advantage[token.turn] for token in sample.response_tokens]


def credit_returns(
    sample: RefSample,
    advantage: float,
    *,
    gamma: float,
    kl_coef: float = 0.0,
    estimator: Estimator = "k1",
    policy: Policy = "prox",
) -> list[float]:
    """A_t = gamma^(n - t) A - kl_coef * sum over u >= t of gamma^(u - t) k_u (REINFORCE++, arXiv 2501.03262)."""
    penalty = token_kl(sample, estimator, policy)
    n = len(penalty)
    found = []
    for t in range(n):
        later = sum(gamma ** (u - t) * penalty[u] for u in range(t, n))
        found.append(gamma ** (n - 1 - t) * advantage - kl_coef * later)
    return found


def token_rewards(
    sample: RefSample, score: float, *, kl_coef: float, estimator: Estimator, policy: Policy
) -> list[float]:
    """-kl_coef * k_t, plus the score at the last token or, where turns are rewarded, each turn's at its last token."""
    rewards = [-kl_coef * penalty for penalty in token_kl(sample, estimator, policy)]
    turns = [token.turn for token in sample.response_tokens]
    for t in range(len(rewards)):
        last_of_turn = t == len(turns) - 1 or turns[t + 1] != turns[t]
        if sample.turn_rewards and last_of_turn:
            rewards[t] += sample.turn_rewards[turns[t]]
        if not sample.turn_rewards and t == len(turns) - 1:
            rewards[t] += score
    return rewards


def credit_gae(
    sample: RefSample,
    score: float,
    *,
    gamma: float,
    lam: float,
    kl_coef: float = 0.0,
    estimator: Estimator = "k1",
    policy: Policy = "prox",
) -> tuple[list[float], list[float]]:
    """(advantages, returns) by generalised advantage estimation (arXiv 1506.02438, eq. 16), summed out:

    A_t = sum over u >= t of (gamma lam)^(u - t) delta_u, delta_u = r_u + gamma V_(u + 1) - V_u, V after the last is 0;
    the returns are A_t + V_t.
    """
    rewards = token_rewards(sample, score, kl_coef=kl_coef, estimator=estimator, policy=policy)
    values = [token.value for token in sample.response_tokens]
    n = len(values)
    deltas = []
    for t in range(n):
        after = values[t + 1] if t + 1 < n else 0.0
        deltas.append(rewards[t] + gamma * after - values[t])
    found = [sum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, n)) for t in range(n)]
    return found, [found[t] + values[t] for t in range(n)]


def whiten(samples: Sequence[RefSample], advantages: Rows) -> Rows:
    """(A - mean) / std over the step's trained tokens, std with n - 1, and 0 without a spread. The others' rows stay as
    they are."""
    pool = [advantages[i][t] for i, t in trained_tokens(samples)]
    if not pool:
        return advantages
    centre = sum(pool) / len(pool)
    spread = math.sqrt(sum((value - centre) ** 2 for value in pool) / (len(pool) - 1)) if len(pool) > 1 else 0.0
    return [
        [(value - centre) / spread if spread > 1e-6 else 0.0 for value in row] if sample.trained else row
        for sample, row in zip(samples, advantages, strict=True)
    ]


def clip_advantages(advantages: Rows, limit: float) -> Rows:
    return [[max(-limit, min(limit, value)) for value in row] for row in advantages]
