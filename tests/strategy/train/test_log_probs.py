"""Log-probs and entropies of given tokens, and their gradients, against a plain softmax."""

from __future__ import annotations

import importlib.util
import math
import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from torch import Tensor, nn
from transformers import LlamaConfig

from roll.strategy.train import logprobs, vocabulary
from roll.strategy.train.logprobs import token_log_probs
from roll.strategy.train.microbatch import sampled_positions
from roll.strategy.train.target_index import TargetIndex
from roll.strategy.train.vocabulary import Kernels, TorchKernels

CPU = torch.device("cpu")


class OutputLayer(nn.Module):
    """As much of a model as log-probs need."""

    def __init__(self, vocab: int, dim: int, cap: float | None = None, bias: bool = False) -> None:
        super().__init__()
        self.config = LlamaConfig(vocab_size=vocab, final_logit_softcapping=cap)
        self.head = nn.Linear(dim, vocab, bias=bias)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


def plain(model: Any, hidden: Tensor, rows: Tensor, targets: Tensor, heat: Tensor) -> tuple[Tensor, Tensor]:
    logits = model.head(hidden)[rows]
    cap = model.config.final_logit_softcapping
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    everything = torch.log_softmax(logits / heat[:, None], dim=-1)
    return everything[torch.arange(len(rows)), targets], -(everything.exp() * everything).sum(-1)


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.integers(1, 30),
    chunk=st.sampled_from([1, 3, 1000]),
    cap=st.sampled_from([None, 2.0]),
    bias=st.booleans(),
    entropy=st.booleans(),
)
def test_log_probs_are_those_of_a_plain_softmax(
    seed: int, tokens: int, chunk: int, cap: float | None, bias: bool, entropy: bool
) -> None:
    vocab, dim, rows = 11, 5, 7
    with torch.random.fork_rng(devices=[]), pytest.MonkeyPatch.context() as patch:
        torch.manual_seed(seed)
        patch.setitem(logprobs.CHUNK_ELEMENTS, "cpu", chunk * vocab)
        model = OutputLayer(vocab, dim, cap, bias)
        hidden = torch.randn(rows, dim, requires_grad=True)
        which, targets = torch.randint(rows, (tokens,)), torch.randint(vocab, (tokens,))
        heat = torch.tensor([0.5, 1.0, 1.7])[torch.randint(3, (tokens,))]
        outward = torch.randn(2, tokens)
        predictions = TargetIndex.of(which.numpy(), targets.numpy(), heat.numpy(), CPU)
        got = token_log_probs(model, hidden, predictions, entropy_gradient=entropy)  # type: ignore[arg-type]
        assert got[1].requires_grad == entropy
        inputs = (hidden, *model.head.parameters())
        weighed = sum((one * weight).sum() for one, weight in zip(got[: 1 + entropy], outward, strict=False))
        gradients = torch.autograd.grad(weighed, inputs)
    expected = plain(model, hidden, which, targets, heat)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    weighed = sum((one * weight).sum() for one, weight in zip(expected[: 1 + entropy], outward, strict=False))
    for one, other in zip(gradients, torch.autograd.grad(weighed, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_frozen_output_layer_gets_no_gradient() -> None:
    model = OutputLayer(11, 5).requires_grad_(False)
    hidden = torch.randn(3, 5, requires_grad=True)
    predictions = TargetIndex.of(np.array([0, 1, 2]), np.array([4, 5, 6]), np.ones(3), CPU)
    log_probs, _ = token_log_probs(model, hidden, predictions)  # type: ignore[arg-type]
    log_probs.sum().backward()
    assert hidden.grad is not None
    assert model.head.weight.grad is None


def test_a_near_certain_token_keeps_its_small_slope() -> None:
    """In bf16 1 - p of a likely token is lost if p is rounded first."""
    model = OutputLayer(4, 2).to(torch.bfloat16)
    with torch.no_grad():
        model.head.weight.copy_(torch.tensor([[8.0, 0], [0, 0], [0, 0], [0, 0]]))
    hidden = torch.tensor([[1.0, 0]], dtype=torch.bfloat16, requires_grad=True)
    predictions = TargetIndex.of(np.array([0]), np.array([0]), np.ones(1), CPU)
    log_probs, _ = token_log_probs(model, hidden, predictions)  # type: ignore[arg-type]
    log_probs.sum().backward()
    missing = 1 - math.exp(8) / (math.exp(8) + 3)
    assert model.head.weight.grad is not None
    assert float(model.head.weight.grad[0, 0]) == pytest.approx(missing, rel=1e-2)


@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.sampled_from([0.5, 1.0])), max_size=20))
def test_every_distribution_and_every_token_of_one_is_there_once(asked: list[tuple[int, int, float]]) -> None:
    rows, targets, heat = (np.array(values) for values in zip(*asked, strict=True)) if asked else (np.zeros(0, int),) * 3
    made = TargetIndex.of(rows, targets, heat, CPU)
    assert len(made) == len({(row, t) for row, _, t in asked})
    assert len(made.targets) == len(set(asked))
    sources = made.sources.tolist()
    assert sources == sorted(sources)
    for (row, token, temperature), pair in zip(asked, made.pair_of.tolist(), strict=True):
        source = sources[pair]
        found = (int(made.rows[source]), int(made.targets[pair]), float(made.temperatures[source]))
        assert found == (row, token, pytest.approx(temperature))
    for size in (1, 2, 100):
        chunks = made.chunks(size)
        assert [d for c in chunks for d in range(c.first, c.last)] == list(range(len(made)))
        for chunk in chunks:
            assert all(chunk.first <= sources[p] < chunk.last for p in range(chunk.first_pair, chunk.last_pair))
        assert [p for c in chunks for p in range(c.first_pair, c.last_pair)] == list(range(len(sources)))


def test_no_tokens_have_no_log_probs() -> None:
    nothing = np.zeros(0, np.int64)
    predictions = TargetIndex.of(nothing, nothing, np.zeros(0), CPU)
    got, entropy = token_log_probs(OutputLayer(4, 3), torch.zeros(2, 3), predictions)  # type: ignore[arg-type]
    assert (got.shape, entropy.shape) == ((0,), (0,))


def test_sampled_tokens_have_something_before_them() -> None:
    def found(*masks: list[bool]) -> tuple[list[int], list[int]]:
        positions, counts = sampled_positions([np.array(mask, np.bool_) for mask in masks])
        return positions.tolist(), counts.tolist()

    assert found([False, True, False, True]) == ([1, 3], [2])
    assert found([False, True], [], [False] * 3, [False, True, True]) == ([1, 6, 7], [1, 0, 0, 2])
    with pytest.raises(ValueError, match="a token log begins with a prompt"):
        found([False, True], [], [True, True])


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=30), st.data())
def test_each_sampled_token_finds_its_distribution_and_pair(temperatures: list[float], data: st.DataObject) -> None:
    count = len(temperatures)
    rows, targets = (np.array(data.draw(st.lists(st.integers(0, 6), min_size=count, max_size=count))) for _ in range(2))
    index = TargetIndex.of(rows, targets, np.array(temperatures), CPU)
    source = index.sources[index.pair_of]
    assert index.rows[source].tolist() == rows.tolist()
    assert index.temperatures[source].tolist() == temperatures
    assert index.targets[index.pair_of].tolist() == targets.tolist()
    assert len(index) == len(set(zip(rows.tolist(), temperatures, strict=True)))
    assert index.pair_starts.tolist() == [int((index.sources < i).sum()) for i in range(len(index) + 1)]


def kernels_agree(kernels: Kernels, device: str, dtype: torch.dtype, cap: float | None) -> None:
    """With the plain ones in fp64; a vocabulary of several blocks, the last not full."""
    rows, vocab = 5, 9000
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(rows, vocab, generator=generator) * 4).to(dtype)
    heat = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.7])
    slopes = torch.randn(2, rows, generator=generator)
    exact = logits.double()
    exact = exact if not cap else cap * torch.tanh(exact / cap)
    log_p = torch.log_softmax(exact / heat[:, None], dim=-1)
    normaliser = torch.logsumexp(exact / heat[:, None], dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    factor = slopes[0][:, None] + slopes[1][:, None] * (log_p + entropy[:, None])
    expected = -log_p.exp() * factor / heat[:, None] * (1 - (exact / cap).square() if cap else 1)
    there, heat_there = logits.to(device), heat.to(device)
    got = kernels.summarise(there, heat_there, cap)
    torch.testing.assert_close(got[0].double().cpu(), normaliser, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1].double().cpu(), entropy, rtol=1e-4, atol=1e-4)
    gradient = kernels.differentiate(there, heat_there, cap, *got, *slopes.to(device))
    assert gradient.data_ptr() == there.data_ptr()
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(gradient.double().cpu(), expected, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [1, 20_000, vocabulary.BLOCK_ELEMENTS])
def test_plain_kernels(dtype: torch.dtype, cap: float | None, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "BLOCK_ELEMENTS", block)
    kernels_agree(TorchKernels(), "cpu", dtype, cap)


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton and TRITON_INTERPRET=1",
)
@pytest.mark.parametrize("cap", [None, 30.0])
def test_triton_kernels_interpreted(cap: float | None) -> None:
    from roll.strategy.train.vocabulary_triton import TritonKernels

    kernels_agree(TritonKernels(), "cpu", torch.float32, cap)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_kernels(dtype: torch.dtype, cap: float | None) -> None:
    from roll.strategy.train.vocabulary_triton import TritonKernels

    kernels_agree(TritonKernels(), "cuda", dtype, cap)
