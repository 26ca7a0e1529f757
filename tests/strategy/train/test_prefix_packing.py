"""Packing and tree attention: shared prefixes once, and the numbers of separate sequences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from numpy.typing import NDArray
from torch import Tensor, nn

from roll.data.tokenlog import common_prefix
from roll.model.attention import AttentionPlan
from roll.strategy.train import tree_attention
from roll.strategy.train.packing import PrefixTree, common_prefixes, cut, pack, sorted_order
from roll.strategy.train.tree_attention import BucketPlan, VarlenPlan, tree_plan

CASES = settings(max_examples=examples(100), deadline=None, derandomize=True)
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
def test_neighbours_share_what_two_of_them_alone_share(sequences: list[NDArray[np.int32]]) -> None:
    expected = [common_prefix(one, other) for one, other in itertools.pairwise(sequences)]
    assert common_prefixes(sequences) == expected


@CASES
@given(SEQUENCES)
def test_order_is_that_of_the_numbers(sequences: list[NDArray[np.int32]]) -> None:
    assert sorted_order(sequences) == sorted(range(len(sequences)), key=lambda i: (sequences[i].tolist(), i))


@CASES
@given(SEQUENCES, st.integers(1, 20))
def test_micro_batches_partition_and_keep_the_limit(sequences: list[NDArray[np.int32]], limit: int) -> None:
    for share in (True, False):
        pieces = cut(sequences, limit, share)
        assert sorted(i for piece in pieces for i in piece.tolist()) == list(range(len(sequences)))
        for piece in pieces:
            assert len(piece) == 1 or pack([sequences[i] for i in piece], share).rows <= limit
        # No two neighbours would have fitted into one.
        for one, other in itertools.pairwise(pieces):
            assert pack([sequences[i] for i in (*one, other[0])], share).rows > limit


@CASES
@given(SEQUENCES)
def test_without_sharing_every_sequence_has_rows_of_its_own(sequences: list[NDArray[np.int32]]) -> None:
    tree = pack(sequences, share=False)
    assert tree.rows == sum(map(len, sequences))
    assert tree.new == [len(sequence) for sequence in sequences]
    assert sorted(row for path in tree.paths for row in path.tolist()) == list(range(tree.rows))
    for sequence, path in zip(sequences, tree.paths, strict=True):
        assert tree.ids[path].tolist() == sequence.tolist()
        assert tree.positions[path].tolist() == list(range(len(sequence)))


def test_the_example_of_the_docstring() -> None:
    tree = pack([np.array(s, np.int32) for s in ([1, 2, 3], [1, 2, 4], [1, 2])])
    assert tree.ids.tolist() == [1, 2, 3, 4]
    assert [path.tolist() for path in tree.paths] == [[0, 1, 2], [0, 1, 3], [0, 1]]
    assert tree.positions.tolist() == [0, 1, 2, 2]
    assert cut([], 8) == []


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


def separate_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **options: object
) -> Tensor:
    """What variable-length flash attention computes, one sequence and head at a time: the last query sees every key."""
    assert options["window_size"] == (-1, 0)
    repeats = query.shape[1] // key.shape[1]
    parts = []
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True):
        assert 0 < q1 - q0 <= max_q
        assert q1 - q0 <= k1 - k0 <= max_k
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
        heads = []
        for head in range(query.shape[1]):
            q, k, v = query[q0:q1, head], key[k0:k1, head // repeats], value[k0:k1, head // repeats]
            scores = (q @ k.T * options["scale"]).masked_fill(~seen, -math.inf)
            heads.append(torch.softmax(scores, dim=-1) @ v)
        parts.append(torch.stack(heads, dim=1))
    return torch.cat(parts)


PLANS = {
    "buckets": lambda tree: BucketPlan(tree, torch.device("cpu"), torch.float64),
    "varlen": lambda tree: VarlenPlan(tree, torch.device("cpu")),
}


@pytest.fixture(params=PLANS)
def make_plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[PrefixTree], AttentionPlan]:
    """Either plan; flash attention, which a CPU has not, is replaced by what it computes."""
    monkeypatch.setattr(tree_attention, "varlen_attn", separate_varlen)
    monkeypatch.setattr(tree_attention, "_gathered", lambda tensor, rows: tensor[rows])  # in fp64, not fp32
    return PLANS[request.param]


@settings(
    max_examples=examples(20),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 2**32 - 1),
    prompts=st.integers(1, 3),
    answers=st.integers(1, 4),
    longest=st.sampled_from([2, 5, 40, 90]),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2), (4, 1)]),
    share=st.booleans(),
)
def test_tree_attention_is_that_of_separate_sequences(
    make_plan: Callable[[PrefixTree], AttentionPlan],
    seed: int,
    prompts: int,
    answers: int,
    longest: int,
    heads: tuple[int, int],
    share: bool,
) -> None:
    tree = pack(random_tree(seed, prompts, answers, longest), share)
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(count, tree.rows, 6, dtype=torch.float64, generator=generator).requires_grad_()
        for count in (heads[0], heads[1], heads[1])
    )
    got = make_plan(tree).attend(nn.Module(), query, key, value, 0.3)
    expected = separate_attention(tree, query, key, value, 0.3)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    outward = torch.randn(got.shape, dtype=torch.float64, generator=generator)
    for one, other in zip(
        torch.autograd.grad((got * outward).sum(), (query, key, value)),
        torch.autograd.grad((expected * outward).sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_a_sequence_that_is_anothers_beginning_adds_nothing(make_plan: Callable[[PrefixTree], AttentionPlan]) -> None:
    tree = pack([np.array(s, np.int32) for s in ([5, 6, 7], [5, 6], [5, 6, 7], [])])
    assert tree.rows == 3
    query, key = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    got = make_plan(tree).attend(nn.Module(), query, key, key, 1.0)
    torch.testing.assert_close(got, separate_attention(tree, query, key, key, 1.0))


def test_only_what_is_shared_needs_a_mask() -> None:
    def masks(share: bool) -> list[bool]:
        plan = BucketPlan(pack(random_tree(0, 3, 4, 30), share), torch.device("cpu"), torch.float32)
        return [bucket._mask is not None for bucket in plan.buckets]

    assert not any(masks(share=False))
    assert any(masks(share=True))


def test_a_cpu_and_fp32_take_the_padded_plan() -> None:
    tree = pack([np.arange(3, dtype=np.int32)])
    assert isinstance(tree_plan(tree, torch.device("cpu"), torch.bfloat16), BucketPlan)


def random_rows(tree: PrefixTree, dtype: torch.dtype, heads: tuple[int, int], dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    counts = (heads[0], heads[1], heads[1])
    return [torch.randn(n, tree.rows, dim, generator=generator).to("cuda", dtype).requires_grad_() for n in counts]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(("heads", "dim"), [((9, 3), 64), ((12, 2), 128), ((4, 4), 32)])
def test_flash_attention_is_that_of_separate_sequences(share: bool, heads: tuple[int, int], dim: int) -> None:
    tree = pack(random_tree(1, 3, 4, 300), share)
    rows = random_rows(tree, torch.bfloat16, heads, dim)
    plan = tree_plan(tree, torch.device("cuda"), torch.bfloat16)
    assert isinstance(plan, VarlenPlan)
    got = plan.attend(nn.Module(), *rows, dim**-0.5)
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in rows]
    expected = separate_attention(tree, *exact, dim**-0.5)
    torch.testing.assert_close(got.double().cpu(), expected, rtol=2e-2, atol=2e-2)
    outward = torch.randn(got.shape, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    for one, other in zip(
        torch.autograd.grad((got * outward.cuda()).sum(), rows),
        torch.autograd.grad((expected * outward.double()).sum(), exact),
        strict=True,
    ):
        assert float((one.double().cpu() - other).norm() / other.norm()) < 1e-2
