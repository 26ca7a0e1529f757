"""Estimators of an evaluation with several attempts per task: mean reward, pass@k and maj@k, each with an interval.

Attempts at one task are correlated, so intervals treat tasks, not attempts, as independent: eight attempts at each of 30
tasks give a wider interval than one attempt at each of 240.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

CONFIDENCE = 0.95


@dataclass(frozen=True)
class MeanEstimate:
    """A mean over tasks, and the bounds of its 95 % interval, which need two tasks or more."""

    value: float
    low: float | None
    high: float | None
    tasks: int

    @property
    def interval(self) -> str:
        """The interval as text; empty if there is none."""
        return "" if self.low is None else f"95 % interval {self.low:.3f} to {self.high:.3f}"

    def __str__(self) -> str:
        return f"{self.value:.3f}" if self.low is None else f"{self.value:.3f} ({self.interval})"


def pass_at(attempts: int, solved: int, k: int) -> float:
    """Probability that at least one of k attempts, chosen at random from those made, has solved the task: 1 - C(n-c, k) /
    C(n, k), the unbiased estimator of Chen et al. (2021), arXiv 2107.03374."""
    if not 1 <= k <= attempts:
        raise ValueError(f"pass@{k} needs {k} attempts, but there are {attempts}")
    return 1.0 - math.comb(attempts - solved, k) / math.comb(attempts, k)


def majority_at(answers: Sequence[Hashable | None], solved: Sequence[bool], k: int) -> float:
    """Mean correctness of the most frequent answer among k attempts, over every choice of k of the attempts made.

    An attempt without an answer (None) does not vote. If several answers are most frequent, the mean of their correctness
    counts; if no attempt has an answer, 0. The correctness of an answer is the share of its attempts that are solved.

    For every number of votes v that a winner may have, the choices are counted answer by answer: `ways[t][m]` is the
    number of ways to choose m attempts from the answers processed so far such that no answer has more than v votes and t
    answers have exactly v; `right[t][m]` is the sum, over these ways, of the correctness of those t answers.
    """
    made = len(answers)
    if not 1 <= k <= made:
        raise ValueError(f"maj@{k} needs {k} attempts, but there are {made}")
    counts = Counter(answer for answer in answers if answer is not None)
    correctness = {
        answer: fmean(s for a, s in zip(answers, solved, strict=True) if a == answer) for answer in counts
    }  # correctness by answer
    unanswered = made - counts.total()
    total = 0.0
    for votes in range(1, min(k, max(counts.values(), default=0)) + 1):
        ties = k // votes
        ways = [[0] * (k + 1) for _ in range(ties + 1)]
        right = [[0.0] * (k + 1) for _ in range(ties + 1)]
        for chosen in range(min(unanswered, k) + 1):
            ways[0][chosen] = math.comb(unanswered, chosen)
        for answer, count in counts.items():
            ways, right = _with_answer(ways, right, count, correctness[answer], votes, k)
        total += sum(right[t][k] / t for t in range(1, ties + 1))
    return total / math.comb(made, k)


def _with_answer(
    ways: list[list[int]], right: list[list[float]], count: int, correctness: float, votes: int, k: int
) -> tuple[list[list[int]], list[list[float]]]:
    """The tables of `majority_at` after one more answer, which `count` attempts have."""
    more_ways = [[0] * (k + 1) for _ in ways]
    more_right = [[0.0] * (k + 1) for _ in ways]
    for votes_given in range(min(count, votes) + 1):
        times, wins = math.comb(count, votes_given), votes_given == votes
        for tied in range(len(ways) - wins):
            for chosen in range(k + 1 - votes_given):
                before = ways[tied][chosen]
                if before:
                    more_ways[tied + wins][chosen + votes_given] += times * before
                    more_right[tied + wins][chosen + votes_given] += times * (
                        right[tied][chosen] + wins * correctness * before
                    )
    return more_ways, more_right


def mean_of(strata: Sequence[Sequence[Sequence[float]]], *, shares: bool, answers: int = 0) -> MeanEstimate:
    """The mean over strata of the mean of all values in each, with a 95 % interval.

    A stratum is a list of tasks, a task a list of values. `shares`: every value is a share of correct answers, from 0 to
    1; `answers`: the total number of answers, if a value summarizes several.
    The standard error is cluster-robust, with one cluster per task. The interval is Student's around the mean. For shares
    it is Wilson's, which stays between 0 and 1 and is not empty at either end; its number of independent answers is the
    one that gives this standard error, at most the number of answers, or, if all answers are correct or all wrong, the
    number of tasks (of several strata, the equivalent for their mean).
    """
    means, variances, tasks, values = [], [], 0, 0
    for stratum in strata:
        count = sum(map(len, stratum))
        mean = math.fsum(value for task in stratum for value in task) / count
        means.append(mean)
        variances.append(_variance(stratum, mean, count))
        tasks += len(stratum)
        values += count
    value = fmean(means)
    if any(len(stratum) < 2 for stratum in strata):
        return MeanEstimate(value, None, None, tasks)
    variance = math.fsum(variances) / len(strata) ** 2
    quantile = student_quantile(0.5 + CONFIDENCE / 2, tasks - len(strata))
    if not shares:
        half_width = quantile * math.sqrt(variance)
        return MeanEstimate(value, value - half_width, value + half_width, tasks)
    independent = len(strata) ** 2 / math.fsum(1 / len(stratum) for stratum in strata)
    if 0 < value < 1:
        independent = min(value * (1 - value) / variance, answers or values) if variance else answers or values
    return MeanEstimate(value, *wilson(value, independent, quantile), tasks)


def _variance(stratum: Sequence[Sequence[float]], mean: float, count: int) -> float:
    """Variance of the mean of a stratum's values; values of one task may be correlated in any way."""
    if len(stratum) < 2:
        return 0.0
    squared_errors = math.fsum(math.fsum(value - mean for value in task) ** 2 for task in stratum)
    return squared_errors / count**2 * len(stratum) / (len(stratum) - 1)


def wilson(share: float, count: float, quantile: float) -> tuple[float, float]:
    """Wilson's interval for a share of `count` independent answers."""
    scale = quantile**2 / count
    middle = (share + scale / 2) / (1 + scale)
    half_width = quantile / (1 + scale) * math.sqrt(share * (1 - share) / count + scale / (4 * count))
    return max(0.0, min(share, middle - half_width)), min(1.0, max(share, middle + half_width))


def student_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's distribution: exact for 1 and 2 degrees of freedom, else Cornish and Fisher's expansion about
    the normal one, at 0.975 within 0.2 %."""
    if degrees == 1:
        return math.tan(math.pi * (probability - 0.5))
    if degrees == 2:
        return (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / degrees**power for power, term in enumerate(terms, 1))
