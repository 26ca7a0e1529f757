"""The reference losses: worked examples by hand, and gradients against finite differences.

What stands under a stop-gradient is held fixed while a log-probability is moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from by_hand import sample, token, valued
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from reference.critic import critic_gradient, critic_loss
from reference.divergence import mismatch
from reference.logits import entropy, entropy_slope, log_prob_slope, log_softmax
from reference.losses import Name, RefLoss, entropy_gradient, share_cut, step_gradient, step_loss, token_weight
from reference.samples import RefSample, Rows
from strategies import EXTREME, USUAL, losses, random_rows, steps

CASES = settings(max_examples=examples(150), deadline=None, derandomize=True)
near = pytest.approx
LOG = math.log


def test_mismatch_on_two_tokens() -> None:
    """D = log 2, -log 2: ratios 2 and 1/2. k3 = (2 - 1 + 1/2 - 1) / 2; ess = 2.5^2 / (2 * 4.25). Cut over 1.5: half."""
    log2 = math.log(2)
    samples = [sample(token(beh=-1 - log2), token(beh=-1 + log2)), sample(token(beh=-9), weight=0)]
    found = mismatch(samples)
    assert (found.mean_abs, found.max_abs) == near((log2, log2))
    assert (found.k3, found.ess) == near((0.25, 6.25 / 8.5))
    loss = RefLoss("clipped", correction="truncated", correction_cap=1.5)
    assert share_cut(samples, loss) == 0.5
    assert share_cut(samples, replace(loss, correction="masked", correction_low=0.6)) == 1
    assert share_cut(samples, replace(loss, correction_level="sequence")) == 0
    assert share_cut(samples, replace(loss, correction="none")) == 0


@pytest.mark.parametrize(
    ("rho", "advantage", "cost", "slope"),
    [
        (1.1, 2, -2.2, -2.2),
        (1.5, 2, -2.4, 0),
        (0.5, 2, -1, -1),
        (0.5, -2, 1.6, 0),
        (1.5, -2, 3, 3),
        (4.0, -2, 6, 0),
    ],
)
def test_clipped_on_every_side(rho: float, advantage: float, cost: float, slope: float) -> None:
    """Clip 0.2 and 0.2, dual clip 3. The cost is -rho A where it moves, else -1.2 A, -0.8 A or -3 A.

    Its slope by the log-probability is the cost itself where it moves, since d rho / d cur = rho.
    """
    samples = [sample(token(cur=-1 + LOG(rho)))]
    loss = RefLoss("clipped", dual_clip=3.0)
    assert step_loss(samples, [[advantage]], loss) == near(cost)
    assert step_gradient(samples, [[advantage]], loss) == [near([slope])]


@pytest.mark.parametrize(
    ("name", "cost", "slope"),
    [
        ("cispo", 1.2 * 2 * -2, 1.2 * 2),
        ("topr", 0.75 * 2 * -2, 0.75 * 2),
        ("sapo", 2 * 4 / 1.05 / (1 + math.exp(-1.05 * 0.5)), None),
        ("reinforce", 2 * -2, 2),
        ("nll", 2, -1),
    ],
)
def test_the_other_losses_on_one_token(name: Name, cost: float, slope: float | None) -> None:
    """cur = -2, ratio to prox 1.5, to beh 0.75, advantage -2, clip 0.2."""
    samples = [sample(token(cur=-2, prox=-2 - LOG(1.5), beh=-2 - LOG(0.75)))]
    assert step_loss(samples, [[-2]], RefLoss(name)) == near(cost)
    if slope is not None:
        assert step_gradient(samples, [[-2]], RefLoss(name)) == [near([slope])]


def test_topr_spares_the_positive() -> None:
    samples = [sample(token(cur=-2, beh=-1))]
    assert step_loss(samples, [[0.5]], RefLoss("topr")) == 1
    assert step_gradient(samples, [[0]], RefLoss("topr")) == [[0]]


def test_a_sequence_has_the_ratio_of_its_mean() -> None:
    """Log-ratios log 4 and 0: by token 4 and 1, by sequence sqrt 4 = 2 for both, each log-prob moving it by 2 / 2.

    Unclipped (A = -1): by token the mean cost is (4 + 1) / 2, by sequence 2, and its slope 1 by either token. By turn,
    the tokens in turns of their own, it is as by token.
    """
    samples = [sample(token(cur=-1 + LOG(4), turn=0), token(turn=1))]
    loss = RefLoss("clipped")
    for level in ("token", "turn"):
        assert step_loss(samples, [[-1, -1]], replace(loss, ratio=level)) == near(2.5)
        assert step_gradient(samples, [[-1, -1]], replace(loss, ratio=level)) == [near([2, 0.5])]
    assert step_loss(samples, [[-1, -1]], replace(loss, ratio="sequence")) == near(2)
    assert step_gradient(samples, [[-1, -1]], replace(loss, ratio="sequence")) == [near([1, 1])]


@pytest.mark.parametrize(
    ("mode", "level", "expected"),
    [
        ("none", "token", (1, 1, 1)),
        ("truncated", "token", (3, 0.5, 4)),
        ("truncated", "turn", (1.5, 1.5, 4)),
        ("truncated", "sequence", (4, 4, 4)),
        ("masked", "token", (3, 0, 0)),
        ("masked", "turn", (1.5, 1.5, 0)),
        ("masked", "sequence", (0, 0, 0)),
    ],
)
def test_corrections_and_their_levels(mode: str, level: str, expected: tuple[float, ...]) -> None:
    """Importance 3, 1/2 in the first turn and 6 in the second: turns 3/2 and 6, the sample 9. Low 0.6, cap 4.

    On the policy (cur = prox) with A = 1 a token's cost is minus its weight; the KL, k1 = 1 each, is not weighed.
    """
    ratios, turns = (3, 0.5, 6), (0, 0, 1)
    tokens = [token(beh=-1 - LOG(ratio), ref=-2, turn=k) for ratio, k in zip(ratios, turns, strict=True)]
    loss = RefLoss(
        "clipped",
        correction=mode,  # type: ignore[arg-type]
        correction_level=level,  # type: ignore[arg-type]
        correction_low=0.6,
        correction_cap=4,
        kl_coef=10,
        kl_estimator="k1",
        aggregation="sequence_sum",
    )
    samples = [sample(*tokens)]
    assert step_loss(samples, [[1, 1, 1]], loss) == near(30 - sum(expected))
    assert step_gradient(samples, [[1, 1, 1]], loss) == [near([10 - weight for weight in expected])]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", (1 / 4, 1 / 4, 0, 0)),
        ("sequence_mean", (1 / 6, 1 / 2, 0, 0)),
        ("sequence_sum", (1 / 2, 1 / 2, 0, 0)),
        ("fixed_length", (1 / 20, 1 / 20, 0, 0)),
    ],
)
def test_weights_of_tokens(aggregation: str, expected: tuple[float, ...]) -> None:
    """Answers of 3 and 1 tokens, one of weight 0 and one without a token: S = 2, four tokens, L = 10."""
    samples = [sample(token(), token(), token()), sample(token()), sample(token(), weight=0), sample()]
    loss = RefLoss("nll", aggregation=aggregation, length_normaliser=10, entropy_coef=0.5)  # type: ignore[arg-type]
    assert [token_weight(samples, i, loss) for i in range(4)] == near(expected)
    assert entropy_gradient(samples, loss)[1] == near([-0.5 * expected[1]])
    total = 3 * expected[0] + expected[1]
    assert step_loss(samples, [[0] * 3, [0], [0], []], loss) == near(total)


def test_a_step_without_trained_tokens_costs_nothing() -> None:
    samples = [sample(), sample(token(), weight=0)]
    assert step_loss(samples, [[], [1]], RefLoss("clipped")) == 0
    assert step_gradient(samples, [[], [1]], RefLoss("clipped")) == [[], [0]]
    assert critic_loss(samples, [[], [1]], [[], [2]], 0.2) == 0


def differences(at: Callable[[Rows], float], rows: Rows, step: float = 1e-6) -> Rows:
    """Central differences of a function of a number a token; NaN where the two sides disagree, which is a kink."""
    found: Rows = []
    middle = at(rows)
    for i, row in enumerate(rows):
        found.append([])
        for t in range(len(row)):
            moved = [list(each) for each in rows]
            moved[i][t] = row[t] + step
            above = at(moved)
            moved[i][t] = row[t] - step
            below = at(moved)
            kink = abs((above - middle) - (middle - below)) > 1e-3 * step * max(1.0, abs(middle))
            found[i].append(math.nan if kink else (above - below) / (2 * step))
    return found


def agree(gradient: Rows, numeric: Rows) -> None:
    for mine, theirs in zip(gradient, numeric, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert math.isnan(b) or a == near(b, rel=1e-4, abs=1e-5)


@CASES
@given(steps(gaps=(0.0, USUAL, 1.5)), losses(), st.integers(0, 2**31))
def test_gradients_of_every_loss(step: list[RefSample], loss: RefLoss, seed: int) -> None:
    gains = random_rows(step, seed)

    def cost(rows: Rows) -> float:
        moved = [each.with_current(row) for each, row in zip(step, rows, strict=True)]
        return step_loss(moved, gains, loss, frozen=step)

    current = [[token.cur for token in each.response_tokens] for each in step]
    agree(step_gradient(step, gains, loss), differences(cost, current))


@pytest.mark.parametrize("name", ["clipped", "sapo"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("gap", [-40.0, 19.0, 40.0])
def test_far_ratios_stay_finite(name: Name, advantage: float, gap: float) -> None:
    """Beyond e^20 nothing moves; at e^19 the clipped loss of a negative advantage still moves by its whole ratio."""
    samples = [sample(token(cur=-1 + gap))]
    cost = step_loss(samples, [[advantage]], RefLoss(name))
    slope = step_gradient(samples, [[advantage]], RefLoss(name))[0][0]
    moves = name == "clipped" and advantage < 0 and gap == 19.0
    assert slope == near(math.exp(19) if moves else 0, abs=1e-12)
    assert abs(cost) <= math.exp(20) * 1.001


@CASES
@given(steps(gaps=(EXTREME,)), losses(), st.integers(0, 2**31))
def test_extreme_steps_have_finite_losses(step: list[RefSample], loss: RefLoss, seed: int) -> None:
    gains = random_rows(step, seed)
    assert math.isfinite(step_loss(step, gains, loss))
    assert all(math.isfinite(slope) for row in step_gradient(step, gains, loss) for slope in row)


def test_the_critic_on_four_tokens() -> None:
    """V_old 0, clip 0.2, (V, R): (0.1, 1) inside; (1, 2) held at 0.2, 1.8^2 > 1^2; (1, -2) free is larger, 3^2 > 2.2^2.

    Costs 0.405, 1.62, 4.5; slopes -0.9, 0, 3, all over three tokens. The fourth has no weight. Without the clip the
    second costs 0.5 and its slope is -1.
    """
    samples = [valued(sample(token(), token(), token()), 0, 0, 0), sample(token(), weight=0)]
    values, returns = [[0.1, 1.0, 1.0], [5.0]], [[1.0, 2.0, -2.0], [0.0]]
    assert critic_loss(samples, values, returns, 0.2) == near((0.405 + 1.62 + 4.5) / 3)
    assert critic_gradient(samples, values, returns, 0.2) == [near([-0.3, 0, 1]), [0]]
    assert critic_loss(samples, values, returns, None) == near((0.405 + 0.5 + 4.5) / 3)
    assert critic_gradient(samples, values, returns, None) == [near([-0.3, -1 / 3, 1]), [0]]


@CASES
@given(steps(gaps=(USUAL,)), st.sampled_from((None, 0.2, 1.0)), st.integers(0, 2**31))
def test_gradients_of_the_critic(step: list[RefSample], value_clip: float | None, seed: int) -> None:
    values, returns = random_rows(step, seed), random_rows(step, seed + 1)
    numeric = differences(lambda rows: critic_loss(step, rows, returns, value_clip), values)
    agree(critic_gradient(step, values, returns, value_clip), numeric)


def test_logits_of_two_tokens() -> None:
    """Logits 0 and 2 log 3 at temperature 2 are odds of 1 to 3."""
    logits = np.array([0, 2 * LOG(3)])
    assert np.exp(log_softmax(logits, 2.0)) == near(np.array([0.25, 0.75]))
    assert entropy(logits, 2.0) == near(0.25 * LOG(4) + 0.75 * LOG(4 / 3))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_slopes_by_logits(temperature: float) -> None:
    logits = np.random.default_rng(0).normal(size=5)
    for v in range(5):
        nudge = 1e-6 * np.eye(5)[v]
        above, below = logits + nudge, logits - nudge
        by_entropy = (entropy(above, temperature) - entropy(below, temperature)) / 2e-6
        by_log_prob = (log_softmax(above, temperature)[2] - log_softmax(below, temperature)[2]) / 2e-6
        assert entropy_slope(logits, temperature)[v] == near(by_entropy, abs=1e-8)
        assert log_prob_slope(logits, 2, temperature)[v] == near(by_log_prob, abs=1e-8)
