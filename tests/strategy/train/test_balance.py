"""Samples over data ranks: each once, evenly, prefixes shared where that is cheaper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.data.batch import Batch
from roll.data.remote_columns import Indices
from roll.data.tokenlog import FORK, IntArray
from roll.model.shape import ModelShape
from roll.strategy.train.balance import TokenCost, balance
from roll.strategy.train.packing import pack

SHAPE = ModelShape(
    parameters=10_000_000, output=0, layers=4, hidden=256, inner=512, heads=4, kv_heads=2, head_dim=64, vocab=100
)


def batch_of(groups: list[tuple[int, list[int]]], seed: int = 0, untrained: tuple[int, ...] = ()) -> Batch:
    """Groups of a prompt length and response lengths; the samples at `untrained` have no token to train on."""
    rng = np.random.default_rng(seed)
    rows, masks, group = [], [], []
    for number, (prompt_length, responses) in enumerate(groups):
        prompt = rng.integers(1, 100, prompt_length)
        for length in responses:
            rows.append(np.concatenate([prompt, rng.integers(1, 100, length)]).astype(np.int32))
            masks.append(np.arange(len(rows[-1])) >= max(prompt_length, 1))
            group.append(number)
    for index in untrained:
        masks[index][:] = False
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    columns = {
        "ids": np.concatenate(rows),
        "loss_mask": np.concatenate(masks),
        "group": np.array(group),
        "temperature": np.ones(len(rows), np.float32),
    }
    return Batch(offsets, columns)


GROUPS = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 40), min_size=1, max_size=6)), min_size=1, max_size=12
)
COST = TokenCost.of(SHAPE)


def tree_cost(sequences: Sequence[IntArray], cost: TokenCost = COST) -> float:
    """From the tree that a trainer packs."""
    tree = pack(sequences)
    return tree.rows + cost.pair * int((tree.positions + 1).sum())


def least_loaded(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """The most expensive first, each on the least loaded rank."""
    loads, parts = np.zeros(ranks), [[] for _ in range(ranks)]
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        rank = int(loads.argmin())
        loads[rank] += costs[item]
        parts[rank].append(item)
    return parts


def slowest(batch: Batch, parts: Sequence[Sequence[int] | Indices], cost: TokenCost = COST) -> float:
    rows = batch.rows("ids")
    return max(tree_cost([rows[sample] for sample in part], cost) for part in parts if len(part))


def by_sample(batch: Batch, ranks: int, cost: TokenCost = COST) -> float:
    return slowest(batch, least_loaded([tree_cost([row], cost) for row in batch.rows("ids")], ranks), cost)


def by_group(batch: Batch, ranks: int, cost: TokenCost = COST) -> float:
    rows = batch.rows("ids")
    groups = [np.flatnonzero(batch["group"] == group).tolist() for group in dict.fromkeys(batch["group"].tolist())]
    placed = least_loaded([tree_cost([rows[sample] for sample in group], cost) for group in groups], ranks)
    return slowest(batch, [[sample for group in part for sample in groups[group]] for part in placed], cost)


@settings(deadline=None, max_examples=examples(60))
@given(GROUPS, st.integers(1, 8), st.integers(0, 3))
def test_every_sample_is_on_one_rank_and_loads_are_what_the_ranks_compute(
    groups: list[tuple[int, list[int]]], ranks: int, seed: int
) -> None:
    batch = batch_of(groups, seed)
    found = balance(batch, ranks, SHAPE)
    assert len(found.parts) == ranks
    assert sorted(np.concatenate(found.parts).tolist()) == list(range(len(batch)))
    again = balance(batch, ranks, SHAPE)
    assert all(np.array_equal(a, b) for a, b in zip(found.parts, again.parts, strict=True))
    rows = batch.rows("ids")
    for part, load in zip(found.parts, found.loads, strict=True):
        assert load == pytest.approx(tree_cost([rows[i] for i in part]))


@settings(deadline=None, max_examples=examples(60))
@given(GROUPS, st.integers(2, 8), st.integers(0, 3))
def test_the_slowest_rank_is_never_slower_than_with_whole_groups_or_single_samples(
    groups: list[tuple[int, list[int]]], ranks: int, seed: int
) -> None:
    batch = batch_of(groups, seed)
    found = max(balance(batch, ranks, SHAPE).loads)
    assert found <= by_group(batch, ranks) * (1 + 1e-9)
    assert found <= by_sample(batch, ranks) * (1 + 1e-9)


def test_branches_of_a_conversation_are_sequences_of_their_own() -> None:
    """Two samples of three branches each, of which one begins as one of the other sample does."""
    branches = [[[1, 2, 3], [1, 2, 4, 5], [7]], [[1, 2, 4, 6], [8, 9], [1, 2, 3, 3]]]
    ids = [np.concatenate(own) for own in branches]
    turns = []
    for own in branches:
        turns.append(np.zeros(sum(map(len, own)), np.int32))
        turns[-1][np.cumsum([len(branch) for branch in own])[:-1]] = FORK
    columns = {
        "ids": np.concatenate(ids).astype(np.int32),
        "turn": np.concatenate(turns),
        "loss_mask": np.ones(sum(map(len, ids)), np.bool_),
        "group": np.array([0, 0]),
    }
    batch = Batch(np.cumsum([0, *map(len, ids)]), columns)
    flat = [np.array(branch, np.int32) for own in branches for branch in own]
    assert balance(batch, 1, SHAPE).loads == (pytest.approx(tree_cost(flat)),)
    assert sorted(balance(batch, 2, SHAPE).loads) == pytest.approx(sorted(map(tree_cost, (flat[:3], flat[3:]))))


LARGE = ModelShape(
    parameters=32_000_000_000, output=0, layers=64, hidden=5120, inner=25600, heads=64, kv_heads=8, head_dim=128, vocab=1
)
PFLOP = 6 * LARGE.parameters / 1e15
"""Of a forward and a backward pass, per unit of cost."""


def long_tailed(groups: int, size: int, prompt: int, mean: int) -> Batch:
    """Groups that share a system prompt, with answers of log-normal lengths."""
    rng = np.random.default_rng(0)
    system, rows = rng.integers(1, 30_000, 200), []
    for _ in range(groups):
        start = np.concatenate([system, rng.integers(1, 30_000, prompt)])
        for _ in range(size):
            length = max(int(rng.lognormal(np.log(mean), 0.8)), 4)
            rows.append(np.concatenate([start, rng.integers(1, 30_000, length)]).astype(np.int32))
    offsets = np.cumsum([0, *map(len, rows)])
    mask = np.ones(offsets[-1], np.bool_)
    return Batch(offsets, {"ids": np.concatenate(rows), "loss_mask": mask, "group": np.repeat(np.arange(groups), size)})


@pytest.mark.parametrize(
    ("groups", "size", "prompt", "mean", "ranks", "whole", "single", "adaptive"),
    [
        (64, 8, 600, 400, 8, 7.9, 12.6, 7.9),
        (128, 16, 4000, 1000, 64, 13.7, 36.3, 12.9),
        pytest.param(512, 16, 1000, 4000, 256, 105.7, 62.0, 62.0, marks=pytest.mark.slow),
    ],
)
def test_the_slowest_rank_of_a_32b_model(
    groups: int, size: int, prompt: int, mean: int, ranks: int, whole: float, single: float, adaptive: float
) -> None:
    """In PFLOP: whole groups where prompts are long, single samples where answers are, something between where neither
    is even."""
    batch, cost = long_tailed(groups, size, prompt, mean), TokenCost.of(LARGE)
    assert by_group(batch, ranks, cost) * PFLOP == pytest.approx(whole, rel=0.01)
    assert by_sample(batch, ranks, cost) * PFLOP == pytest.approx(single, rel=0.01)
    assert max(balance(batch, ranks, LARGE).loads) * PFLOP == pytest.approx(adaptive, rel=0.03)


def test_long_prompts_keep_groups_whole_and_long_responses_split_them() -> None:
    shared = batch_of([(400, [4] * 4)] * 4)
    assert all(len(set(shared["group"][part].tolist())) == 1 for part in balance(shared, 4, SHAPE).parts)
    alone = batch_of([(4, [200] * 8)])
    assert [len(part) for part in balance(alone, 4, SHAPE).parts] == [2, 2, 2, 2]
    assert balance(alone, 4, SHAPE).imbalance < 0.01


def test_samples_without_a_token_to_train_on_cost_nothing() -> None:
    batch = batch_of([(5, [10, 10]), (5, [10, 10])], untrained=(0, 1))
    found = balance(batch, 2, SHAPE)
    assert sorted(np.concatenate(found.parts).tolist()) == [0, 1, 2, 3]
    assert max(found.loads) < tree_cost(batch.rows("ids")[2:4])


def test_a_rank_without_samples_is_allowed() -> None:
    found = balance(batch_of([(3, [5])]), 4, SHAPE)
    assert sorted(map(len, found.parts)) == [0, 0, 0, 1]
    assert found.imbalance == 3.0


def test_the_cost_of_a_tree_counts_rows_once_and_attends_along_paths() -> None:
    sequences = [np.array([1, 2, 3], np.int32), np.array([1, 2, 4], np.int32), np.array([5], np.int32)]
    cost = TokenCost.of(replace(SHAPE, parameters=1000, layers=2, heads=5, head_dim=10))
    assert cost.pair == 4 * 2 * 50 / 2000
    assert cost.of_tree(np.array([3, 3, 1]), np.array([0, 2, 0])) == 5 + cost.pair * (1 + 2 + 3 + 3 + 1)
    assert tree_cost(sequences, cost) == 5 + cost.pair * 10
