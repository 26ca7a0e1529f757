"""Group-relative advantages against plain Python, written from the formula of arXiv 2402.03300, section 4.1.2."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.algorithm import make_algorithm
from roll.algorithm.advantages import group_relative
from roll.config import load_config
from roll.data import Batch, Sample, Task

REWARDS = st.sampled_from([0.0, 1.0, 0.1, 0.5, -1.0, 1 / 3]) | st.floats(-10, 10).map(lambda x: round(x, 3))


def reference(rewards: list[float], groups: list[int], scale_by_std: bool) -> list[float]:
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        siblings = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if max(siblings) == min(siblings):
            result.append(0.0)
            continue
        mean = math.fsum(siblings) / len(siblings)
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in siblings) / (len(siblings) - 1))
        result.append((reward - mean) / std if scale_by_std else reward - mean)
    return result


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(st.lists(st.tuples(REWARDS, st.sampled_from([0, 1, 2, 17, -4])), min_size=1, max_size=30), st.booleans())
def test_it_is_the_formula(samples: list[tuple[float, int]], scale_by_std: bool) -> None:
    rewards, groups = [r for r, _ in samples], [g for _, g in samples]
    got = group_relative(np.array(rewards), np.array(groups), scale_by_std)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, reference(rewards, groups, scale_by_std), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scale_by_std", [True, False])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -7.7, 1e6 + 0.1])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_equal_rewards_give_exact_zeros(reward: float, size: int, scale_by_std: bool) -> None:
    got = group_relative(np.full(size, reward), np.zeros(size, np.int64), scale_by_std)
    assert got.tolist() == [0.0] * size


def test_a_group_does_not_see_the_others() -> None:
    rewards, groups = np.array([1.0, 5.0, 0.0, 7.0, 1.0]), np.array([0, 1, 0, 1, 0])
    whole = group_relative(rewards, groups, True)
    for group in (0, 1):
        alone = group_relative(rewards[groups == group], groups[groups == group], True)
        np.testing.assert_array_equal(whole[groups == group], alone)


def test_no_samples() -> None:
    assert group_relative(np.zeros(0), np.zeros(0, np.int64), True).tolist() == []


@pytest.mark.parametrize("scale_by_std", [True, False])
def test_grpo_credits_every_sample_of_a_batch(scale_by_std: bool) -> None:
    rewards, groups = [1.0, 0.0, 0.0, 2.0, 2.0], [4, 4, 4, 9, 9]
    samples = [
        Sample(str(i), Task.ask("t", "?"), group, 1.0, reward=reward)
        for i, (reward, group) in enumerate(zip(rewards, groups, strict=True))
    ]
    config = load_config({"algorithm": {"scale": "group" if scale_by_std else "none"}})
    batch = make_algorithm(config).credit(Batch.from_samples(samples))
    np.testing.assert_allclose(batch["advantage"], reference(rewards, groups, scale_by_std), rtol=1e-6)
