"""From rewards to one advantage and one weight a sample.

Statistics count every sample of the step, those of weight 0 included: weights decide what is trained on, afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from reference.divergence import Estimator, kl
from reference.samples import RefSample

Baseline = Literal["none", "group", "leave_one_out", "batch", "running", "greedy"]
Scale = Literal["none", "group", "batch", "running"]
History = Sequence[tuple[str, float]]
"""(domain, score) of every sample of the steps before."""

NO_SPREAD = 1e-6


def shaped_reward(
    reward: float, *, low: float = -math.inf, high: float = math.inf, scale: float = 1.0, shift: float = 0.0
) -> float:
    """scale * clip(reward, low, high) + shift."""
    return scale * max(low, min(high, reward)) + shift


def overlong_penalty(length: int, *, longest: int, buffer: int) -> float:
    """DAPO's soft punishment of long answers (arXiv 2503.14476, eq. 13): from 0 to -1 over the last `buffer` tokens."""
    if length <= longest - buffer:
        return 0.0
    if length <= longest:
        return ((longest - buffer) - length) / buffer
    return -1.0


def kl_of_sample(sample: RefSample, estimator: Estimator, policy: Literal["prox", "beh"] = "prox") -> float:
    """The sum over the sampled tokens of k(policy, ref): what KL in the reward takes off a whole sample's score."""
    total = 0.0
    for token in sample.response_tokens:
        total += kl(token.prox if policy == "prox" else token.beh, token.ref, estimator)
    return total


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """The standard deviation with n - 1; 0 of a single value."""
    if len(values) < 2:
        return 0.0
    centre = mean(values)
    return math.sqrt(sum((value - centre) ** 2 for value in values) / (len(values) - 1))


def peers(
    i: int,
    samples: Sequence[RefSample],
    scores: Sequence[float],
    kind: Literal["group", "batch", "running"],
    per_domain: bool,
    history: History,
) -> list[float]:
    """The scores a statistic of sample i is taken over, its own included."""
    mine = samples[i]
    if kind == "group":
        return [score for sample, score in zip(samples, scores, strict=True) if sample.group == mine.group]
    seen = [(sample.domain, score) for sample, score in zip(samples, scores, strict=True)]
    if kind == "running":
        seen = [*history, *seen]
    return [score for domain, score in seen if not per_domain or domain == mine.domain]


def advantages(
    samples: Sequence[RefSample],
    scores: Sequence[float],
    *,
    baseline: Baseline,
    scale: Scale,
    per_domain: bool = False,
    history: History = (),
) -> list[float]:
    """A_i = (score_i - b_i) / s_i; 0 where s_i is below 1e-6, and of a group of one where the group is the measure.

    b: none 0; group, the group's mean (GRPO, arXiv 2402.03300, section 4.1.2); leave_one_out, the mean of the group's
    others (RLOO, arXiv 2402.14740); batch, running: the mean of the step, of all steps; greedy, the reward of the
    task's greedy answer (ReMax, arXiv 2310.10505). s: none 1 (Dr. GRPO, arXiv 2503.20783), else a standard deviation with
    n - 1 (batch: arXiv 2508.08221).
    """
    found = []
    for i, (sample, score) in enumerate(zip(samples, scores, strict=True)):
        group = peers(i, samples, scores, "group", per_domain, history)
        if len(group) == 1 and (baseline in ("group", "leave_one_out") or scale == "group"):
            found.append(0.0)
            continue
        match baseline:
            case "none":
                centre = 0.0
            case "leave_one_out":
                centre = (sum(group) - score) / (len(group) - 1)
            case "greedy":
                centre = sample.baseline
            case _:
                centre = mean(peers(i, samples, scores, baseline, per_domain, history))
        if scale == "none":
            found.append(score - centre)
            continue
        spread = deviation(peers(i, samples, scores, scale, per_domain, history))
        found.append((score - centre) / spread if spread >= NO_SPREAD else 0.0)
    return found


def positive(scores: Sequence[float], above: float) -> tuple[list[float], list[float]]:
    """RAFT (arXiv 2304.06767, 2504.11343): (advantages, weights), both 1 where the score is over `above`, else 0."""
    chosen = [1.0 if score > above else 0.0 for score in scores]
    return chosen, list(chosen)


def weights(
    samples: Sequence[RefSample], *, mask_truncated: bool = False, difficulty: tuple[float, float] | None = None
) -> list[float]:
    """Each sample's weight, set to 0 if it was cut off, or if its group's mean raw reward is outside [low, high]."""
    kept = []
    for sample in samples:
        weight = sample.weight
        if mask_truncated and sample.truncated:
            weight = 0.0
        if difficulty is not None:
            hardness = mean([other.reward for other in samples if other.group == sample.group])
            if not difficulty[0] <= hardness <= difficulty[1]:
                weight = 0.0
        kept.append(weight)
    return kept


def turn_returns(rewards: Sequence[float], gamma: float) -> list[float]:
    """G_k = sum over j >= k of gamma^(j - k) r_j (GiGPO, arXiv 2505.10978)."""
    return [sum(gamma ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))]


def turn_advantages(
    samples: Sequence[RefSample],
    episode: Sequence[float],
    *,
    gamma: float,
    step_weight: float,
    scale: Literal["none", "group"],
) -> list[list[float]]:
    """GiGPO's A_E + step_weight * A_S of every turn (arXiv 2505.10978).

    A_S compares a turn's return with those of all turns of its group that began in the same state; it is 0 of a turn
    alone in its state, and where the returns do not differ.
    """
    returns = [turn_returns(sample.turn_rewards, gamma) for sample in samples]
    found = []
    for i, sample in enumerate(samples):
        row = []
        for k, state in enumerate(sample.turn_states):
            alike = []
            for j, other in enumerate(samples):
                for m, other_state in enumerate(other.turn_states):
                    if other.group == sample.group and other_state == state:
                        alike.append(returns[j][m])
            spread = deviation(alike)
            step = 0.0
            if len(alike) > 1 and spread >= NO_SPREAD:
                step = (returns[i][k] - mean(alike)) / (spread if scale == "group" else 1.0)
            row.append(episode[i] + step_weight * step)
        found.append(row)
    return found
