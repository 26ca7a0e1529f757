"""The Triton kernels over the vocabulary. Imported only where Triton is installed."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _tanh(values):
    return 2 / (1 + tl.exp(-2 * values)) - 1


@triton.jit
def _summarise(
    logits, temperatures, normalisers, entropies, cap, VOCAB: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per row: the running maximum, Σ exp(z - max) and Σ (z - max) exp(z - max), rescaled whenever the
    maximum rises."""
    row = tl.program_id(0).to(tl.int64)
    scale = 1 / tl.load(temperatures + row)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    weighted = tl.zeros((), tl.float32)
    for start in range(0, VOCAB, BLOCK):
        spots = start + tl.arange(0, BLOCK)
        inside = spots < VOCAB
        values = tl.load(logits + row * VOCAB + spots, mask=inside, other=0.0).to(tl.float32)
        if CAPPED:
            values = cap * _tanh(values / cap)
        values = tl.where(inside, values * scale, float("-inf"))
        higher = tl.maximum(largest, tl.max(values, 0))
        shift = largest - higher
        shrink = tl.where(largest == float("-inf"), 0.0, tl.exp(shift))
        weights = tl.exp(values - higher)
        weighted = tl.where(largest == float("-inf"), 0.0, (weighted + shift * total) * shrink)
        weighted += tl.sum(tl.where(inside, weights * (values - higher), 0.0), 0)
        total = total * shrink + tl.sum(weights, 0)
        largest = higher
    tl.store(normalisers + row, largest + tl.log(total))
    tl.store(entropies + row, tl.log(total) - weighted / total)


@triton.jit
def _differentiate(
    logits,
    temperatures,
    normalisers,
    entropies,
    totals,
    entropy_slopes,
    cap,
    VOCAB: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    spots = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = spots < VOCAB
    scale = 1 / tl.load(temperatures + row)
    where = logits + row * VOCAB + spots
    values = tl.load(where, mask=inside, other=0.0).to(tl.float32)
    if CAPPED:
        values = cap * _tanh(values / cap)
    log_p = values * scale - tl.load(normalisers + row)
    factor = tl.load(totals + row) + tl.load(entropy_slopes + row) * (log_p + tl.load(entropies + row))
    gradient = -tl.exp(log_p) * factor * scale
    if CAPPED:
        gradient *= 1 - (values / cap) * (values / cap)
    tl.store(where, gradient.to(logits.dtype.element_ty), mask=inside)


class TritonKernels:
    def summarise(self, logits: Tensor, temperatures: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
        rows, vocab = logits.shape
        normalisers, entropies = torch.empty(2, rows, device=logits.device)
        launch: Any = _summarise[(rows,)]
        launch(
            logits,
            temperatures,
            normalisers,
            entropies,
            cap or 0.0,
            VOCAB=vocab,
            CAPPED=bool(cap),
            BLOCK=BLOCK,
            num_warps=8,
        )
        return normalisers, entropies

    def differentiate(
        self,
        logits: Tensor,
        temperatures: Tensor,
        cap: float | None,
        normalisers: Tensor,
        entropies: Tensor,
        totals: Tensor,
        entropy_slopes: Tensor | None,
    ) -> Tensor:
        rows, vocab = logits.shape
        launch: Any = _differentiate[(rows, triton.cdiv(vocab, BLOCK))]
        slopes = torch.zeros_like(totals) if entropy_slopes is None else entropy_slopes
        given = (temperatures, normalisers, entropies, totals, slopes)
        launch(logits, *given, cap or 0.0, VOCAB=vocab, CAPPED=bool(cap), BLOCK=BLOCK, num_warps=8)
        return logits
