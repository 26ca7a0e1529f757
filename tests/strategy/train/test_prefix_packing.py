"""Packing and tree attention: shared prefixes once, and the numbers of separate sequences."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import LlamaConfig

from roll.strategy.train import logprobs
from roll.strategy.train.logprobs import response_positions, token_log_probs
from roll.strategy.train.packing import PrefixTree, TreePlan, common_prefix, micro_batches, pack, sorted_order

CASES = settings(max_examples=100, deadline=None, derandomize=True)
SEQUENCES = st.lists(
    # Few symbols make shared prefixes; large ids check that order is by number, not by byte.
    st.lists(st.sampled_from([0, 1, 255, 256, 70000]), max_size=7).map(lambda ids: np.array(ids, np.int32)),
    max_size=12,
)


def distinct_prefixes(sequences: list[NDArray[np.int32]]) -> set[tuple[int, ...]]:
    return {tuple(s[: i + 1].tolist()) for s in sequences for i in range(len(s))}


@CASES
@given(SEQUENCES)
def test_every_distinct_prefix_is_one_row(sequences: list[NDArray[np.int32]]) -> None:
    tree = pack(sequences)
    assert tree.rows == len(tree.ids) == len(tree.positions) == len(distinct_prefixes(sequences))
    row_of: dict[tuple[int, ...], int] = {}
    for sequence, path in zip(sequences, tree.paths, strict=True):
        assert tree.ids[path].tolist() == sequence.tolist()
        assert tree.positions[path].tolist() == list(range(len(sequence)))
        for i, row in enumerate(path.tolist()):
            assert row_of.setdefault(tuple(sequence[: i + 1].tolist()), row) == row
    assert sorted(row_of.values()) == list(range(tree.rows))
    # Every row is new in exactly one sequence, at the end of its path.
    fresh = [row for path, new in zip(tree.paths, tree.new, strict=True) for row in path[len(path) - new :].tolist()]
    assert sorted(fresh) == list(range(tree.rows))


@CASES
@given(SEQUENCES)
def test_order_is_that_of_the_numbers(sequences: list[NDArray[np.int32]]) -> None:
    assert sorted_order(sequences) == sorted(range(len(sequences)), key=lambda i: (sequences[i].tolist(), i))


@CASES
@given(SEQUENCES, st.integers(1, 20))
def test_micro_batches_partition_and_keep_the_limit(sequences: list[NDArray[np.int32]], limit: int) -> None:
    cuts = micro_batches(sequences, limit)
    assert sorted(i for cut in cuts for i in cut.tolist()) == list(range(len(sequences)))
    for cut in cuts:
        assert len(cut) == 1 or pack([sequences[i] for i in cut]).rows <= limit
    # No two neighbours would have fitted into one.
    for one, other in itertools.pairwise(cuts):
        assert pack([sequences[i] for i in (*one, other[0])]).rows > limit


def test_the_example_of_the_docstring() -> None:
    tree = pack([np.array(s, np.int32) for s in ([1, 2, 3], [1, 2, 4], [1, 2])])
    assert tree.ids.tolist() == [1, 2, 3, 4]
    assert [path.tolist() for path in tree.paths] == [[0, 1, 2], [0, 1, 3], [0, 1]]
    assert tree.positions.tolist() == [0, 1, 2, 2]
    assert micro_batches([], 8) == []
    assert common_prefix(np.array([1, 2], np.int32), np.array([1, 2, 3], np.int32)) == 2


def separate_attention(tree: PrefixTree, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """[rows, heads, dim]: every sequence by itself, causally, one head at a time."""
    heads, repeats = query.shape[0], query.shape[0] // key.shape[0]
    out = torch.zeros(tree.rows, heads, query.shape[2], dtype=query.dtype)
    for path in tree.paths:
        causal = torch.ones(len(path), len(path), dtype=torch.bool).tril()
        for head in range(heads):
            q, k, v = query[head, path], key[head // repeats, path], value[head // repeats, path]
            scores = (q @ k.T * scale).masked_fill(~causal, -math.inf)
            out[path, head] = torch.softmax(scores, dim=-1) @ v
    return out


def random_tree(seed: int, prompts: int, answers: int, longest: int) -> list[NDArray[np.int32]]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(prompts):
        prompt = rng.integers(0, 3, rng.integers(1, longest))
        for _ in range(answers):
            made.append(np.concatenate([prompt, rng.integers(0, 3, rng.integers(0, longest))]).astype(np.int32))
    return [made[i] for i in rng.permutation(len(made))]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    prompts=st.integers(1, 3),
    answers=st.integers(1, 4),
    longest=st.sampled_from([2, 5, 40, 90]),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2), (4, 1)]),
)
def test_tree_attention_is_that_of_separate_sequences(
    seed: int, prompts: int, answers: int, longest: int, heads: tuple[int, int]
) -> None:
    tree = pack(random_tree(seed, prompts, answers, longest))
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(count, tree.rows, 6, dtype=torch.float64, generator=generator).requires_grad_()
        for count in (heads[0], heads[1], heads[1])
    )
    got = TreePlan(tree, torch.device("cpu")).attend(0, query, key, value, 0.3)
    expected = separate_attention(tree, query, key, value, 0.3)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    outward = torch.randn(got.shape, dtype=torch.float64, generator=generator)
    for one, other in zip(
        torch.autograd.grad((got * outward).sum(), (query, key, value)),
        torch.autograd.grad((expected * outward).sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_a_sequence_that_is_anothers_beginning_adds_nothing() -> None:
    tree = pack([np.array(s, np.int32) for s in ([5, 6, 7], [5, 6], [5, 6, 7], [])])
    assert tree.rows == 3
    query, key = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    got = TreePlan(tree, torch.device("cpu")).attend(0, query, key, key, 1.0)
    torch.testing.assert_close(got, separate_attention(tree, query, key, key, 1.0))


class OutputLayer(nn.Module):
    """As much of a model as log-probs need."""

    def __init__(self, vocab: int, dim: int, cap: float | None) -> None:
        super().__init__()
        self.config = LlamaConfig(vocab_size=vocab, final_logit_softcapping=cap)
        self.head = nn.Linear(dim, vocab, bias=False)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.integers(1, 30),
    chunk=st.sampled_from([1, 3, 1000]),
    cap=st.sampled_from([None, 2.0]),
)
def test_token_log_probs_are_those_of_a_plain_softmax(seed: int, tokens: int, chunk: int, cap: float | None) -> None:
    vocab, dim, rows = 11, 5, 7
    with torch.random.fork_rng(devices=[]), pytest.MonkeyPatch.context() as patch:
        torch.manual_seed(seed)
        patch.setattr(logprobs, "CHUNK_ELEMENTS", chunk * vocab)
        model = OutputLayer(vocab, dim, cap)
        hidden = torch.randn(rows, dim, requires_grad=True)
        which, targets = torch.randint(rows, (tokens,)), torch.randint(vocab, (tokens,))
        temperatures = torch.tensor([0.5, 1.0, 1.7])[torch.randint(3, (tokens,))]
        got, entropy = token_log_probs(model, hidden, which, targets, temperatures)  # type: ignore[arg-type]
        outward = torch.randn(tokens)
    logits = model.head(hidden)[which]
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    everything = torch.log_softmax(logits / temperatures[:, None], dim=-1)
    expected = everything[torch.arange(tokens), targets]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropy, -(everything.exp() * everything).sum(-1), rtol=1e-5, atol=1e-5)
    assert not entropy.requires_grad
    inputs = (hidden, model.head.weight)
    for one, other in zip(
        torch.autograd.grad((got * outward).sum(), inputs),
        torch.autograd.grad((expected * outward).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_no_tokens_have_no_log_probs() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    got, entropy = token_log_probs(OutputLayer(4, 3, None), torch.zeros(2, 3), nothing, nothing, torch.zeros(0))  # type: ignore[arg-type]
    assert (got.shape, entropy.shape) == ((0,), (0,))


def test_sampled_tokens_have_something_before_them() -> None:
    assert response_positions(np.array([False, True, False, True])).tolist() == [1, 3]
    assert response_positions(np.zeros(3, np.bool_)).tolist() == []
    assert response_positions(np.zeros(0, np.bool_)).tolist() == []
    with pytest.raises(ValueError, match="a token log begins with a prompt"):
        response_positions(np.array([True, True]))
