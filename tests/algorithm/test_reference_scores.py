"""The references from rewards to token advantages: worked examples by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
from by_hand import sample, token, valued
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from reference.credit import (
    clip_advantages,
    credit_gae,
    credit_returns,
    credit_sample,
    credit_turns,
    whiten,
)
from reference.divergence import Estimator, adapted_coefficient, kl, kl_slope
from reference.samples import RefSample
from reference.scores import (
    Baseline,
    Scale,
    advantages,
    kl_of_sample,
    overlong_penalty,
    positive,
    shaped_reward,
    turn_advantages,
    turn_returns,
    weights,
)
from strategies import steps

CASES = settings(max_examples=examples(150), deadline=None, derandomize=True)
near = pytest.approx


def of_rewards(*groups: tuple[float, ...]) -> list[RefSample]:
    return [sample(token(), group=g, reward=reward) for g, group in enumerate(groups) for reward in group]


def judged(samples: list[RefSample], baseline: Baseline, scale: Scale, **options: object) -> list[float]:
    scores = [each.reward for each in samples]
    return advantages(samples, scores, baseline=baseline, scale=scale, **options)  # type: ignore[arg-type]


def test_shaping_clips_then_scales_then_shifts() -> None:
    """2 * clip(5, 0, 1) - 1 = 1; 2 * clip(0.25, 0, 1) - 1 = -0.5."""
    assert shaped_reward(5, low=0, high=1, scale=2, shift=-1) == 1
    assert shaped_reward(0.25, low=0, high=1, scale=2, shift=-1) == -0.5


@pytest.mark.parametrize(("length", "penalty"), [(79, 0), (80, 0), (85, -0.25), (100, -1), (101, -1)])
def test_overlong_answers_lose_up_to_one(length: int, penalty: float) -> None:
    """Of 100 tokens with a buffer of 20 the line falls from 0 at 80 to -1 at 100; at 85 it is (80 - 85) / 20."""
    assert overlong_penalty(length, longest=100, buffer=20) == penalty


def test_baselines_and_scales_on_two_groups() -> None:
    """Group a: 0, 1, 2 (mean 1, deviation 1). Group b: 4, 8 (mean 6, deviation sqrt(8) = 2 sqrt 2).

    Leave one out: of 0, 0 - 3/2; of 1, 1 - 2/2; of 2, 2 - 1/2; of 4, 4 - 8; of 8, 8 - 4. The batch's mean is 3, its
    squares 9 + 4 + 1 + 1 + 25 = 40, its deviation sqrt(40 / 4).
    """
    samples = of_rewards((0, 1, 2), (4, 8))
    assert judged(samples, "none", "none") == [0, 1, 2, 4, 8]
    assert judged(samples, "group", "none") == [-1, 0, 1, -2, 2]
    assert judged(samples, "group", "group") == near([-1, 0, 1, -(0.5**0.5), 0.5**0.5])
    assert judged(samples, "leave_one_out", "none") == [-1.5, 0, 1.5, -4, 4]
    assert judged(samples, "batch", "none") == [-3, -2, -1, 1, 5]
    assert judged(samples, "group", "batch") == near([value / 10**0.5 for value in (-1, 0, 1, -2, 2)])
    greedy = [replace(each, baseline=1.0) for each in samples]
    assert judged(greedy, "greedy", "none") == [-1, 0, 1, 3, 7]


def test_running_statistics_hold_all_steps_so_far() -> None:
    """Earlier 0 and 4 (domain x) and 100 (y); now 2 (x) and 10 (y). Of x: mean 2, deviation sqrt(8 / 2) = 2.

    Of y: mean 55, deviation sqrt(2 * 45^2). Of all: mean 116 / 5.
    """
    now = [replace(each, domain=domain) for each, domain in zip(of_rewards((2,), (10,)), "xy", strict=True)]
    history = [("x", 0.0), ("x", 4.0), ("y", 100.0)]
    assert judged(now, "running", "none", history=history) == near([2 - 23.2, 10 - 23.2])
    assert judged(now, "running", "running", history=history, per_domain=True) == near([0, -(0.5**0.5)])
    assert judged(now, "none", "running", history=history, per_domain=True) == near([1, 10 / (45 * 2**0.5)])


def test_statistics_within_a_domain() -> None:
    """Rewards 0, 2 of x and 10, 30 of y: the means are 1 and 20, not 10.5."""
    samples = of_rewards((0,), (2,), (10,), (30,))
    samples = [replace(each, domain=domain) for each, domain in zip(samples, "xxyy", strict=True)]
    assert judged(samples, "batch", "none", per_domain=True) == [-1, 1, -10, 10]
    assert judged(samples, "batch", "batch", per_domain=True) == near([-(0.5**0.5), 0.5**0.5] * 2)


@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
@pytest.mark.parametrize("scale", ["none", "group", "batch", "running"])
def test_no_signal_in_a_group_of_one_or_of_equal_rewards(baseline: Baseline, scale: Scale) -> None:
    assert judged(of_rewards((3,), (0.1, 0.1, 0.1)), baseline, scale) == near([0, 0, 0, 0], abs=1e-15)


@pytest.mark.parametrize("baseline", get_args(Baseline))
@pytest.mark.parametrize("scale", ["group", "batch", "running"])
def test_a_spread_below_a_millionth_is_none(baseline: Baseline, scale: Scale) -> None:
    assert judged(of_rewards((1, 1 + 1e-7)), baseline, scale) == [0, 0]


def test_the_positive_are_all_that_counts() -> None:
    assert positive([0.5, 0.6, -1], above=0.5) == ([0, 1, 0], [0, 1, 0])


def test_weights_leave_out_the_truncated_and_the_too_easy() -> None:
    """Group means 0.5, 1 and 0; [0.1, 0.9] keeps the first, of which the second answer was cut off."""
    samples = of_rewards((0, 1), (1, 1), (0, 0))
    samples[1] = replace(samples[1], truncated=True)
    assert weights(samples) == [1] * 6
    assert weights(samples, difficulty=(0.5, 1.0)) == [1, 1, 1, 1, 0, 0]
    assert weights(samples, mask_truncated=True, difficulty=(0.1, 0.9)) == [1, 0, 0, 0, 0, 0]


def test_turns_are_compared_where_their_state_returned() -> None:
    """gamma 0.5. Returns: first sample 1 + 0.5 * 2 = 2 and 2; second 0; a stranger of another group 50.

    State s was met by the first sample twice and by the second once: 2, 2, 0, mean 4/3, deviation sqrt(4/3). So A_S
    without division is 2/3, 2/3, -4/3, and divided sqrt(1/3), sqrt(1/3), -2 sqrt(1/3). The stranger is alone.
    """
    assert turn_returns([1, 2], 0.5) == [2, 2]
    made = [sample(token(turn=0), token(turn=1)), sample(token()), sample(token(), group=1)]
    first, second, stranger = made
    samples = [
        replace(first, turn_rewards=(1, 2), turn_states=("s", "s")),
        replace(second, turn_rewards=(0,), turn_states=("s",)),
        replace(stranger, turn_rewards=(50,), turn_states=("s",)),
    ]
    plain = turn_advantages(samples, [10, 20, 30], gamma=0.5, step_weight=3, scale="none")
    assert [near(row) for row in plain] == [[12, 12], [16], [30]]
    divided = turn_advantages(samples, [10, 20, 30], gamma=0.5, step_weight=1, scale="group")
    third = 3**-0.5
    assert [near(row) for row in divided] == [[10 + third, 10 + third], [20 - 2 * third], [30]]
    assert credit_turns(samples[0], [7, 8]) == [7, 8]


def test_returns_discount_the_score_and_the_penalty() -> None:
    """gamma 0.5, three tokens, k1 = 1, 2, 4, coefficient 0.1, advantage 8.

    8/4 - 0.1 (1 + 1 + 1), 8/2 - 0.1 (2 + 2), 8 - 0.4.
    """
    answer = sample(token(ref=-2), token(ref=-3), token(ref=-5))
    found = credit_returns(answer, 8, gamma=0.5, kl_coef=0.1, estimator="k1")
    assert found == near([1.7, 3.6, 7.6])
    assert kl_of_sample(answer, "k1") == 7
    assert kl_of_sample(sample(token(beh=-0.5, ref=-2)), "k1", "beh") == 1.5
    assert credit_sample(answer, 8) == [8, 8, 8]


def test_gae_on_three_tokens() -> None:
    """gamma 0.5, lambda 0.5, values 1, 2, 4, score 8: deltas 0 + 1 - 1 = 0, 0 + 2 - 2 = 0, 8 - 4 = 4.

    A = 4/16, 4/4, 4; returns 1.25, 3, 8. With turn rewards 3 (tokens 1, 2) and 5 (token 3) the deltas are 0, 3, 1:
    A = 0 + 3/4 + 1/16, 3 + 1/4, 1. A penalty of 0.1 * 10 on the first token takes 1 off its own advantage alone.
    """
    answer = valued(sample(token(turn=0), token(turn=0), token(turn=1)), 1, 2, 4)
    found, returns = credit_gae(answer, 8, gamma=0.5, lam=0.5)
    assert found == [0.25, 1, 4]
    assert returns == [1.25, 3, 8]
    turns = replace(answer, turn_rewards=(3, 5))
    assert credit_gae(turns, 8, gamma=0.5, lam=0.5)[0] == [0.8125, 3.25, 1]
    tokens = (replace(answer.response_tokens[0], ref=-11), *answer.response_tokens[1:])
    penalised = replace(answer, response_tokens=tokens)
    assert credit_gae(penalised, 8, gamma=0.5, lam=0.5, kl_coef=0.1, estimator="k1")[0] == [-0.75, 1, 4]


@CASES
@given(steps(), st.sampled_from((0.0, 0.9, 1.0)), st.sampled_from((0.0, 0.95, 1.0)))
def test_gae_obeys_its_recursion(step: list[RefSample], gamma: float, lam: float) -> None:
    """A_t = delta_t + gamma lam A_(t + 1); at lambda 1 the returns are the discounted rewards, at 0 one step's."""
    for each in step:
        found, returns = credit_gae(each, each.reward, gamma=gamma, lam=lam, kl_coef=0.1)
        values = [token.value for token in each.response_tokens] + [0.0]
        for t in range(len(found) - 1):
            own = found[t] - gamma * lam * found[t + 1]
            assert returns[t] - values[t] == near(found[t])
            shorter = replace(each, turn_rewards=(), response_tokens=each.response_tokens[: t + 1])
            if not each.turn_rewards:
                alone = credit_gae(shorter, gamma * values[t + 1], gamma=gamma, lam=lam, kl_coef=0.1)[0][-1]
                assert own == near(alone, abs=1e-9)


def test_whitening_counts_trained_tokens_only() -> None:
    """1, 2, 3 have mean 2 and deviation 1 (with n - 1); the row of weight 0 does not count and is not touched."""
    samples = [sample(token(), token()), sample(token(), weight=0), sample(token())]
    found = whiten(samples, [[1, 2], [99], [3]])
    assert found[0] == near([-1, 0])
    assert found[1:] == [[99], near([1])]
    assert clip_advantages([[-3, 0.5, 3]], 1) == [[-1, 0.5, 1]]
    assert whiten([sample()], [[]]) == [[]]
    assert whiten([sample(token())], [[5]]) == [[0]], "one value alone has no spread"


def test_estimators_of_kl() -> None:
    """p = log 1/2, q = log 1/4: k1 = log 2, k2 = log(2)^2 / 2, k3 = 1/2 + log 2 - 1."""
    p, q = math.log(0.5), math.log(0.25)
    assert kl(p, q, "k1") == near(math.log(2))
    assert kl(p, q, "k2") == near(math.log(2) ** 2 / 2)
    assert kl(p, q, "k3") == near(math.log(2) - 0.5)
    assert kl(q, p, "abs") == near(math.log(2))
    assert kl(-50, 0, "k3") == kl(-20, 0, "k3") == near(math.exp(20) - 21)


def test_k1_and_k3_are_unbiased() -> None:
    """Over p = (1/2, 1/4, 1/4) against q = (1/4, 1/4, 1/2) both average to KL(p || q) = log(2) / 2 - log(2) / 4."""
    p, q = (0.5, 0.25, 0.25), (0.25, 0.25, 0.5)
    for estimator in ("k1", "k3"):
        average = sum(a * kl(math.log(a), math.log(b), estimator) for a, b in zip(p, q, strict=True))
        assert average == near(math.log(2) / 4)


@pytest.mark.parametrize("estimator", get_args(Estimator))
@pytest.mark.parametrize("p", [-0.3, -1.7, -30.0])
def test_slopes_of_kl(estimator: Estimator, p: float) -> None:
    slope = (kl(p + 1e-6, -1, estimator) - kl(p - 1e-6, -1, estimator)) / 2e-6
    assert kl_slope(p, -1, estimator) == near(slope, rel=1e-6)


def test_the_coefficient_follows_its_target() -> None:
    """Twice the target: error 1 is held to 0.2, so 0.1 (1 + 0.2 * 50 / 100) = 0.11. At 0.9 of it: 0.1 (1 - 0.05)."""
    assert adapted_coefficient(0.1, 12, target=6, samples=50, horizon=100) == near(0.11)
    assert adapted_coefficient(0.1, 5.4, target=6, samples=50, horizon=100) == near(0.095)
    assert adapted_coefficient(0.1, 0, target=6, samples=50, horizon=100) == near(0.09)
