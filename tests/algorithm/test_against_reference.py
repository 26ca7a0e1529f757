"""The learning core against the references written from the papers, on random ragged steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import strategies
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from reference import credit as ref_credit
from reference import scores as ref_scores
from reference.critic import critic_gradient, critic_loss
from reference.divergence import Estimator, adapted_coefficient, kl, mismatch
from reference.losses import RefLoss, corrected, entropy_gradient, step_gradient, step_loss
from reference.samples import RefSample, Rows

from roll.algorithm import Algorithm, CorrectionSpec, CreditSpec, LossInputs, LossSpec
from roll.algorithm.correction import Mismatch
from roll.algorithm.credit import sample_kl, token_credit
from roll.algorithm.kl import kl_estimate
from roll.algorithm.loss_inputs import token_weights
from roll.algorithm.losses import resolve_loss
from roll.algorithm.reward_shaping import overlong, shaped, turn_factors
from roll.algorithm.running_stats import AdaptiveKLController
from roll.algorithm.value import value_loss
from roll.config.algorithm import AlgorithmConfig
from roll.data import Batch

quick = settings(max_examples=examples(60), deadline=None, derandomize=True)


def batch_of(samples: Sequence[RefSample], **scores: Any) -> Batch:
    """The samples as a batch: a prompt of one token, and an observation of one before every later turn."""
    token_columns: dict[str, list[float]] = {
        n: [] for n in ("behaviour", "proximal", "ref", "values", "turn", "loss_mask")
    }
    lengths = []
    for sample in samples:
        length, before = 0, -1
        for token in sample.response_tokens:
            others = int(token.turn != before)
            values = (token.beh, token.prox, token.ref, token.value, token.turn, True)
            for (name, column), value in zip(token_columns.items(), values, strict=True):
                column.extend([-1 if name == "turn" else 0] * others + [value])
            length, before = length + others + 1, token.turn
        lengths.append(length)
    columns: dict[str, Any] = {name: np.array(values) for name, values in token_columns.items()}
    columns["ids"] = np.zeros(sum(lengths))
    columns |= {
        "group": [s.group for s in samples],
        "domain": [s.domain for s in samples],
        "reward": [s.reward for s in samples],
        "baseline": [s.baseline for s in samples],
        "truncated": [s.truncated for s in samples],
        "response_tokens": [len(s.response_tokens) for s in samples],
        **scores,
    }
    if any(sample.turn_rewards for sample in samples):
        columns["turns"] = [len(s.turn_rewards) for s in samples]
        columns["turn_reward"] = [reward for s in samples for reward in s.turn_rewards]
        columns["turn_state"] = [sum(map(ord, state)) for s in samples for state in s.turn_states]
    turns = columns.pop("turns", None)
    batch = Batch(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), {})
    batch = batch if turns is None else batch.with_columns(turns=np.array(turns))
    return batch.with_columns(**{name: np.asarray(values) for name, values in columns.items()})


def flat(rows: Rows) -> np.ndarray[Any, Any]:
    return np.array([value for row in rows for value in row], np.float64)


def inputs_of(samples: Sequence[RefSample], advantages: Rows) -> LossInputs:
    tokens = [token for sample in samples for token in sample.response_tokens]
    where = [i for i, sample in enumerate(samples) for _ in sample.response_tokens]
    turns = [(i, t.turn) for i, sample in enumerate(samples) for t in sample.response_tokens]
    number = {turn: n for n, turn in enumerate(dict.fromkeys(turns))}
    sample_number = {i: n for n, i in enumerate(dict.fromkeys(where))}
    column = {
        name: torch.tensor([getattr(t, name) for t in tokens], dtype=torch.float64)
        for name in ("cur", "prox", "beh", "ref", "entropy")
    }
    return LossInputs(
        current=column["cur"].requires_grad_(),
        proximal=column["prox"],
        behaviour=column["beh"],
        advantage=torch.from_numpy(flat(advantages)),
        sample=torch.tensor([sample_number[i] for i in where], dtype=torch.int64),
        turn=torch.tensor([number[turn] for turn in turns], dtype=torch.int64),
        ref=column["ref"],
        entropy=column["entropy"].requires_grad_(),
    )


def spec_of(loss: RefLoss) -> LossSpec:
    clips = {"clip_low": loss.clip_low, "clip_high": loss.clip_high, "ratio": loss.ratio}
    params: dict[str, Any] = {
        "clipped": {**clips, "dual_clip": loss.dual_clip},
        "cispo": clips,
        "sapo": {"tau_positive": loss.tau_positive, "tau_negative": loss.tau_negative, "ratio": loss.ratio},
    }.get(loss.name, {})
    correction = None
    if loss.correction != "none":
        correction = CorrectionSpec(loss.correction, loss.correction_level, loss.correction_low, loss.correction_cap)
    return LossSpec(
        loss.name,
        params,
        loss.aggregation,
        loss.length_normaliser,
        correction=correction,
        kl_coef=loss.kl_coef,
        kl_estimator=loss.kl_estimator,
        entropy_coef=loss.entropy_coef,
    )


def trained(samples: Sequence[RefSample]) -> list[RefSample]:
    return [sample for sample in samples if sample.weight == 1.0]


# scores


@quick
@given(st.lists(st.sampled_from(strategies.REWARDS), min_size=1), st.sampled_from([None, (-0.5, 0.8)]), st.floats(-3, 3))
def test_rewards_are_shaped(rewards: list[float], bounds: tuple[float, float] | None, scale: float) -> None:
    low, high = bounds or (-math.inf, math.inf)
    wanted = [ref_scores.shaped_reward(r, low=low, high=high, scale=scale, shift=0.3) for r in rewards]
    np.testing.assert_allclose(shaped(np.array(rewards), bounds, scale, 0.3), wanted, atol=1e-12)


@quick
@given(st.lists(st.integers(0, 130), min_size=1), st.integers(1, 60))
def test_long_answers_lose(lengths: list[int], buffer: int) -> None:
    wanted = [ref_scores.overlong_penalty(n, longest=100, buffer=buffer) for n in lengths]
    np.testing.assert_allclose(overlong(np.array(lengths), 100, buffer), wanted, atol=1e-12)


@pytest.mark.parametrize("scale", get_args(ref_scores.Scale))
@pytest.mark.parametrize("baseline", get_args(ref_scores.Baseline))
@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(st.lists(strategies.steps(), min_size=1, max_size=3), st.booleans())
def test_every_baseline_and_scale(
    baseline: ref_scores.Baseline, scale: ref_scores.Scale, steps: list[list[RefSample]], per_domain: bool
) -> None:
    pieces = {"baseline": baseline, "scale": scale}
    per_domain = per_domain and bool({"batch", "running"} & {baseline, scale})
    algorithm = Algorithm(AlgorithmConfig(**pieces, per_domain=per_domain), 8)  # type: ignore[arg-type]
    history: list[tuple[str, float]] = []
    for samples in steps:
        rewards = [sample.reward for sample in samples]
        wanted = ref_scores.advantages(
            samples, rewards, baseline=baseline, scale=scale, per_domain=per_domain, history=history
        )
        history += [(sample.domain, sample.reward) for sample in samples]
        batch = batch_of(samples)
        np.testing.assert_allclose(algorithm.credit(batch)["advantage"], wanted, rtol=1e-5, atol=1e-6)


@quick
@given(strategies.steps(), st.booleans(), st.sampled_from([None, (0.1, 0.9), (0.0, 1.0)]))
def test_masks(samples: list[RefSample], mask_truncated: bool, difficulty: tuple[float, float] | None) -> None:
    samples = [replace(sample, weight=1.0) for sample in samples]
    kept = ref_scores.weights(samples, mask_truncated=mask_truncated, difficulty=difficulty)
    config = AlgorithmConfig(mask_truncated=mask_truncated, difficulty_range=difficulty)
    batch = batch_of(samples)
    got = Algorithm(config, 8).credit(batch)
    whole = Algorithm(AlgorithmConfig(), 8).credit(batch)["advantage"]
    assert got["advantage"].tolist() == [a for a, weight in zip(whole, kept, strict=True) if weight]


@quick
@given(strategies.steps(), st.sampled_from([0.0, 0.5, 1.0]))
def test_positive_answers_alone(samples: list[RefSample], above: float) -> None:
    advantages, weights = ref_scores.positive([sample.reward for sample in samples], above)
    got = Algorithm(AlgorithmConfig(name="raft_pp", positive_above=above), 8).credit(batch_of(samples))
    assert got["advantage"].tolist() == [a for a, w in zip(advantages, weights, strict=True) if w]


@pytest.mark.parametrize("scale", ["none", "group"])
@quick
@given(strategies.steps(turn_rewards=True, empty=False), st.floats(0.1, 1.0), st.floats(0.1, 2.0))
def test_turns_in_the_same_state(scale: Any, samples: list[RefSample], gamma: float, weight: float) -> None:
    rewards = [sum(sample.turn_rewards) for sample in samples]
    episode = ref_scores.advantages(samples, rewards, baseline="group", scale=scale)
    turns = ref_scores.turn_advantages(samples, episode, gamma=gamma, step_weight=weight, scale=scale)
    config = AlgorithmConfig(name="gigpo", scale=scale, turn_discount=gamma, turn_weight=weight)
    batch = Algorithm(config, 8).credit(batch_of(samples, reward=np.array(rewards)))
    np.testing.assert_allclose(batch["turn_advantage"], flat(turns), rtol=1e-5, atol=1e-5)
    tokens = token_credit(batch, CreditSpec()).advantages[batch.loss_mask]
    wanted = [ref_credit.credit_turns(sample, row) for sample, row in zip(samples, turns, strict=True)]
    np.testing.assert_allclose(tokens, flat(wanted), rtol=1e-5, atol=1e-5)


@quick
@given(
    strategies.steps(turn_rewards=True, empty=False), st.sampled_from([None, (-0.5, 0.8)]), st.sampled_from([0.1, 2.0])
)
def test_turns_are_shaped_as_their_episode_is(
    samples: list[RefSample], bounds: tuple[float, float] | None, scale: float
) -> None:
    """As if the rewards had been given so: the shaped ones to an algorithm that shapes none."""
    rewards = np.array([sum(sample.turn_rewards) for sample in samples])
    kept = scale * rewards if bounds is None else scale * np.clip(rewards, *bounds)
    factors = [k / r if r else scale for k, r in zip(kept, rewards, strict=True)]
    given = [
        replace(sample, turn_rewards=tuple(factor * earned for earned in sample.turn_rewards))
        for sample, factor in zip(samples, factors, strict=True)
    ]
    for pieces in ({"name": "gigpo", "scale": "none"}, {"name": "ppo"}):
        shaping = AlgorithmConfig(**pieces, reward_clip=bounds, reward_scale=scale)  # type: ignore[arg-type]
        got = Algorithm(shaping, 8).credit(batch_of(samples, reward=rewards))
        wanted = Algorithm(AlgorithmConfig(**pieces), 8).credit(batch_of(given, reward=kept))  # type: ignore[arg-type]
        for name in {"advantage", "turn_reward", "turn_advantage"} & set(wanted.columns):
            np.testing.assert_allclose(got[name], wanted[name], rtol=1e-5, atol=1e-6)


def test_a_turn_is_not_blamed_for_the_clip_of_an_episode() -> None:
    factors = turn_factors(np.array([3.0, 0.0, -2.0, -1.0]), (-1.0, 1.0), 0.1)
    np.testing.assert_allclose(factors, [0.1 / 3, 0.1, 0.05, 0.1])
    assert turn_factors(np.array([-3.0]), (1.0, 2.0), 1.0).tolist() == [0.0], "never with another sign"


# credit


@pytest.mark.parametrize("kind", ["sample", "returns", "gae"])
@quick
@given(strategies.steps(), st.data())
def test_credit_reaches_tokens(kind: Any, samples: list[RefSample], data: st.DataObject) -> None:
    samples = trained(samples)
    assume(samples)
    draw = lambda *choices: data.draw(st.sampled_from(choices))  # noqa: E731
    gamma, lam, coef = draw(1.0, 0.9, 0.5), draw(1.0, 0.95, 0.3), draw(0.0, 0.1)
    estimator, whiten, clip = draw(*get_args(Estimator)), draw(True, False), draw(None, 0.7)
    if kind == "gae":  # what turns earned is what their episode earned
        samples = [replace(s, reward=sum(s.turn_rewards)) if s.turn_rewards else s for s in samples]
    scores = [sample.reward for sample in samples]
    returns: Rows = []
    if kind == "sample":
        wanted = [ref_credit.credit_sample(s, score) for s, score in zip(samples, scores, strict=True)]
    elif kind == "returns":
        penalty: dict[str, Any] = {"kl_coef": coef, "estimator": estimator}
        wanted = [ref_credit.credit_returns(s, a, gamma=gamma, **penalty) for s, a in zip(samples, scores, strict=True)]
    else:
        penalty = {"kl_coef": coef, "estimator": estimator}
        both = [
            ref_credit.credit_gae(s, a, gamma=gamma, lam=lam, **penalty) for s, a in zip(samples, scores, strict=True)
        ]
        wanted, returns = [a for a, _ in both], [r for _, r in both]
    wanted = ref_credit.whiten(samples, wanted) if whiten else wanted
    wanted = wanted if clip is None else ref_credit.clip_advantages(wanted, clip)
    batch = batch_of(samples, advantage=np.array(scores))
    spec = CreditSpec(kind, gamma, lam, 0.0 if kind == "sample" else coef, estimator, whiten, clip)
    got = token_credit(batch, spec)
    mask = batch.loss_mask
    assert not got.advantages[~mask].any()
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4 if coef else 1e-5}
    np.testing.assert_allclose(got.advantages[mask], flat(wanted), **close)
    if kind == "gae":
        assert got.returns is not None
        np.testing.assert_allclose(got.returns[mask], flat(returns), **close)


@quick
@given(strategies.steps(gaps=(0.0, 0.3, 3.0)), st.sampled_from(get_args(Estimator)))
def test_a_samples_divergence(samples: list[RefSample], estimator: Estimator) -> None:
    wanted = [ref_scores.kl_of_sample(sample, estimator) for sample in samples]
    np.testing.assert_allclose(sample_kl(batch_of(samples), estimator), wanted, rtol=1e-4, atol=1e-5)


@quick
@given(st.floats(-40, 0), st.floats(-40, 0), st.sampled_from(get_args(Estimator)))
def test_estimators_of_divergence(p: float, q: float, estimator: Estimator) -> None:
    wanted = kl(p, q, estimator)
    assert float(kl_estimate(np.array(p), np.array(q), estimator)) == pytest.approx(wanted, rel=1e-12, abs=1e-12)
    both = (torch.tensor(x, dtype=torch.float64) for x in (p, q))
    assert float(kl_estimate(*both, estimator)) == pytest.approx(wanted, rel=1e-12, abs=1e-12)


@quick
@given(st.floats(0, 1), st.integers(1, 512))
def test_the_weight_of_a_penalty_follows_its_target(observed: float, samples: int) -> None:
    weight = AdaptiveKLController(0.1, 0.05, 1000.0)
    weight.observe(observed, samples)
    wanted = adapted_coefficient(0.1, observed, target=0.05, samples=samples, horizon=1000.0)
    assert weight.value == pytest.approx(wanted, rel=1e-12)


# losses


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(strategies.steps(), strategies.losses(), st.integers(0, 2**31))
def test_losses_and_gradients(samples: list[RefSample], loss: RefLoss, seed: int) -> None:
    samples = trained(samples)
    advantages = strategies.random_rows(samples, seed)
    inputs = inputs_of(samples, advantages)
    assume(len(inputs.current))
    batch = batch_of(samples)
    weights = torch.from_numpy(token_weights(batch, loss.aggregation, loss.length_normaliser)[batch.loss_mask])
    total = (resolve_loss(spec_of(loss))(inputs).values * weights).sum()
    close: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-10}
    np.testing.assert_allclose(float(total.detach()), step_loss(samples, advantages, loss), **close)
    total.backward()
    assert inputs.current.grad is not None
    np.testing.assert_allclose(inputs.current.grad, flat(step_gradient(samples, advantages, loss)), **close)
    if loss.entropy_coef:
        assert inputs.entropy is not None
        np.testing.assert_allclose(inputs.entropy.grad, flat(entropy_gradient(samples, loss)), **close)


@quick
@given(strategies.steps(), st.sampled_from([None, 0.2, 0.05]), st.integers(0, 2**31))
def test_a_critics_loss(samples: list[RefSample], clip: float | None, seed: int) -> None:
    samples = trained(samples)
    values, returns = strategies.random_rows(samples, seed), strategies.random_rows(samples, seed + 1)
    assume(len(flat(values)))
    now = torch.from_numpy(flat(values)).requires_grad_()
    before = torch.tensor([t.value for s in samples for t in s.response_tokens], dtype=torch.float64)
    loss = value_loss(now, before, torch.from_numpy(flat(returns)), clip).mean()
    assert float(loss.detach()) == pytest.approx(critic_loss(samples, values, returns, clip), rel=1e-10, abs=1e-12)
    loss.backward()
    assert now.grad is not None
    np.testing.assert_allclose(now.grad, flat(critic_gradient(samples, values, returns, clip)), rtol=1e-10, atol=1e-12)


@quick
@given(strategies.steps(gaps=(0.0, 0.3, 3.0)), strategies.losses())
def test_the_mismatch(samples: list[RefSample], loss: RefLoss) -> None:
    samples = trained(samples)
    inputs = inputs_of(samples, strategies.random_rows(samples, 0))
    assume(len(inputs.current))
    found = Mismatch()
    found.add(inputs, spec_of(loss).correction)
    metrics, wanted = found.metrics(), mismatch(samples)
    assert metrics["rollout_logprob_diff"] == pytest.approx(wanted.mean_abs, rel=1e-9)
    assert metrics["rollout_logprob_diff_max"] == pytest.approx(wanted.max_abs, rel=1e-9)
    assert metrics["rollout_kl"] == pytest.approx(wanted.k3, rel=1e-6, abs=1e-9)
    assert metrics["is_ess"] == pytest.approx(wanted.ess, rel=1e-6)
    if loss.correction != "none":
        free = replace(loss, correction="truncated", correction_cap=math.inf)
        cut = [corrected(s, t, loss) != corrected(s, t, free) for s in samples for t in range(len(s.response_tokens))]
        assert metrics["is_weight_clip_frac"] == pytest.approx(sum(cut) / len(cut))
