"""Every standard deviation has n - 1, whatever it is taken over, against `statistics.stdev`; equal numbers have none."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.algorithm import Algorithm, CreditSpec
from roll.algorithm.advantages import whitened
from roll.algorithm.credit import token_credit
from roll.algorithm.running_stats import Moments
from roll.config.algorithm import AlgorithmConfig
from roll.config.errors import RunError
from roll.data import Batch

ODD = (0.0, 0.1, 1 / 3, -7.7, 1e6 + 0.1, 1e12 / 3)
"""Numbers whose sums round."""
VALUES = st.integers(-20, 20).map(lambda quarters: quarters / 4)
"""Numbers far enough from each other, and from those, that rounding to fp32 does not change a spread of theirs."""


def standardised(values: list[float]) -> list[float]:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return [(value - statistics.fmean(values)) / spread if spread > 1e-6 else 0.0 for value in values]


def samples(rewards: list[float], groups: list[int], domains: list[str] | None = None) -> Batch:
    """Samples of a prompt token and a response token each."""
    columns = {
        "ids": np.zeros(2 * len(rewards)),
        "loss_mask": np.tile([False, True], len(rewards)),
        "group": np.array(groups),
        "domain": np.array(domains or [""] * len(rewards)),
        "reward": np.array(rewards),
        "truncated": np.zeros(len(rewards), np.bool_),
        "response_tokens": np.ones(len(rewards)),
    }
    return Batch(np.arange(0, 2 * len(rewards) + 1, 2), columns)


def tokens(values: list[float], masked: list[bool]) -> Batch:
    """One sample with a sampled token for each value that is not masked, each in a turn with the value as advantage."""
    sampled = ~np.array([True, *masked])
    turn = np.where(sampled, np.cumsum(sampled) - 1, -1)
    columns: dict[str, Any] = {"ids": np.zeros(len(sampled)), "loss_mask": sampled, "turn": turn}
    batch = Batch(np.array([0, len(sampled)]), columns).with_columns(turns=np.array([int(sampled.sum())]))
    kept = [value for value, out in zip(values, masked, strict=True) if not out]
    return batch.with_columns(turn_advantage=np.array(kept), advantage=np.zeros(1))


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(ODD[:4]) | VALUES, st.booleans()), min_size=1, max_size=20))
def test_whitening_has_n_minus_1_over_the_sampled_tokens(drawn: list[tuple[float, bool]]) -> None:
    values, masked = [value for value, _ in drawn], [out for _, out in drawn]
    if all(masked):
        return
    got = token_credit(tokens(values, masked), CreditSpec("sample", whiten=True)).advantages
    kept = [value for value, out in drawn if not out]
    spread = statistics.stdev(kept) if len(kept) > 1 else 0.0
    rounded = 2**-22 * max(map(abs, kept)) / spread if spread > 1e-6 else 0.0  # by fp32, where a value is near the mean
    np.testing.assert_allclose(got[1:][~np.array(masked)], standardised(kept), rtol=1e-6, atol=1e-9 + rounded)
    assert not got[1:][np.array(masked)].any()


def test_whitening_two_tokens_by_hand() -> None:
    assert whitened(np.array([0.0, 1.0])).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])  # n would give -1 and 1
    assert whitened(np.array([3.0])).tolist() == [0.0]
    assert whitened(np.zeros(0)).tolist() == []


@pytest.mark.parametrize("number", ODD)
@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 1001])
def test_equal_numbers_give_exact_zeros_everywhere(number: float, count: int) -> None:
    equal = [number] * count
    assert not whitened(np.array(equal)).any()
    moments = Moments()
    for part in np.array_split(np.array(equal), min(count, 3)):
        moments.add(part)
    assert (moments.mean, moments.std) == (number, 0.0)
    batch = samples(equal, [0] * count)
    for baseline in ("group", "leave_one_out", "batch", "running"):
        for scale in ("none", "group", "batch", "running"):
            algorithm = Algorithm(AlgorithmConfig(baseline=baseline, scale=scale), 8)
            assert not algorithm.credit(batch)["advantage"].any(), (baseline, scale)


@pytest.mark.parametrize("scale", ["group", "batch", "running"])
@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 1.0, 0.3]), st.integers(0, 2), st.sampled_from("ab")), min_size=1, max_size=20
    )
)
def test_scales_have_n_minus_1(scale: str, drawn: list[tuple[float, int, str]]) -> None:
    """Lite PPO is scale batch, GRPO scale group; by domain where it is over more than a group."""
    rewards = [reward for reward, _, _ in drawn]
    groups, domains = [group for _, group, _ in drawn], [domain for _, _, domain in drawn]
    per_domain = scale != "group"
    config = AlgorithmConfig.model_validate({"baseline": "none", "scale": scale, "per_domain": per_domain})
    got = Algorithm(config, 8).credit(samples(rewards, groups, domains))["advantage"]
    keys: list[Any] = domains if per_domain else groups
    wanted = []
    for reward, key in zip(rewards, keys, strict=True):
        peers = [other for other, theirs in zip(rewards, keys, strict=True) if theirs == key]
        spread = statistics.stdev(peers) if len(peers) > 1 else 0.0
        wanted.append(reward / spread if spread > 1e-6 else 0.0)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_turns_in_one_state_are_compared_with_n_minus_1() -> None:
    """GiGPO: three turns of a group begin in state 5 with the returns 1, 2 and 6; one begins in state 9 alone."""
    batch = Batch(np.array([0, 2, 4, 6, 8]), {"ids": np.zeros(8), "loss_mask": np.tile([False, True], 4)})
    batch = batch.with_columns(turns=np.ones(4, np.int64)).with_columns(
        turn=np.tile([-1, 0], 4),
        group=np.zeros(4, np.int64),
        domain=np.array([""] * 4),
        reward=np.ones(4),  # equal: only the turns differ
        truncated=np.zeros(4, np.bool_),
        response_tokens=np.ones(4),
        turn_reward=np.array([1.0, 2.0, 6.0, 4.0]),
        turn_state=np.array([5, 5, 5, 9]),
    )
    got = Algorithm(AlgorithmConfig(name="gigpo"), 8).credit(batch)["turn_advantage"]
    np.testing.assert_allclose(got, [*standardised([1.0, 2.0, 6.0]), 0.0], rtol=1e-6)


@pytest.mark.parametrize("reward", [1e200, -1e308, float("inf"), float("nan")])
def test_a_reward_whose_square_no_number_holds_is_refused(reward: float) -> None:
    with pytest.raises(RunError, match=r"the reward of a sample is .* a reward is from"):
        Algorithm(AlgorithmConfig(), 4).credit(samples([0.0, reward], [0, 0]))
