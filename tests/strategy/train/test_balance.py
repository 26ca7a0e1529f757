"""Samples over data ranks: each once, evenly, prefixes shared where that is cheaper."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.data.batch import Batch
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


@settings(deadline=None, max_examples=100)
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
    cost = TokenCost.of(SHAPE)
    for part, load in zip(found.parts, found.loads, strict=True):
        sequences = sorted((batch.rows("ids")[i] for i in part), key=lambda row: row.astype(">i4").tobytes())
        # Groups of one rank may share more than was counted: what it computes is at most its load.
        assert cost.of_tree(sequences) <= load * (1 + 1e-9)


@settings(deadline=None, max_examples=100)
@given(GROUPS, st.integers(2, 8))
def test_the_slowest_rank_is_never_slower_than_with_whole_groups(groups: list[tuple[int, list[int]]], ranks: int) -> None:
    batch, cost = batch_of(groups), TokenCost.of(SHAPE)
    ids = batch.rows("ids")
    whole = [
        cost.of_tree(
            sorted((ids[i] for i in np.flatnonzero(batch["group"] == g)), key=lambda r: r.astype(">i4").tobytes())
        )
        for g in range(len(groups))
    ]
    loads = np.zeros(ranks)
    for load in sorted(whole, reverse=True):
        loads[loads.argmin()] += load
    assert max(balance(batch, ranks, SHAPE).loads) <= loads.max() * (1 + 1e-9)


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
    assert max(found.loads) < TokenCost.of(SHAPE).of_tree(batch.rows("ids")[2:4])


def test_a_rank_without_samples_is_allowed() -> None:
    found = balance(batch_of([(3, [5])]), 4, SHAPE)
    assert sorted(map(len, found.parts)) == [0, 0, 0, 1]
    assert found.imbalance == 3.0


def test_the_cost_of_a_tree_counts_rows_once_and_attends_along_paths() -> None:
    sequences = [np.array([1, 2, 3], np.int32), np.array([1, 2, 4], np.int32), np.array([5], np.int32)]
    tree = pack(sequences)
    pairs = int((tree.positions + 1).sum())
    cost = TokenCost.of(replace(SHAPE, parameters=1000, layers=2, heads=5, head_dim=10))
    assert cost.pair == 4 * 2 * 50 / 2000
    assert cost.of_tree(sequences) == tree.rows + cost.pair * pairs
