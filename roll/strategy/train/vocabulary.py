"""Computations over the whole vocabulary: from a chunk of logits to normalisers and entropies, and to its gradient.

There are two implementations: plain torch, and on CUDA one Triton kernel each that reads the logits once. All arithmetic
is in fp32; plain torch uses fp64 for fp64 logits.
"""

from __future__ import annotations

import importlib.util
from typing import Protocol

import torch
from torch import Tensor


class Kernels(Protocol):
    def summarise(self, logits: Tensor, temperatures: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
        """logits [rows, vocab], temperatures [rows] → log Σ exp(z) and the entropy of softmax(z), z = cap(logits) / T."""
        ...

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
        """-p (total + entropy_slope (log p + entropy)) / T for every logit, written to the logits' own storage. Without
        `entropy_slopes` they are zero."""
        ...


def kernels_for(device: torch.device) -> Kernels:
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from roll.strategy.train.vocabulary_triton import TritonKernels

        return TritonKernels()
    return TorchKernels()


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The precision of computations from logits of a precision: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


BLOCK_ELEMENTS = 1 << 19
"""Logits that plain torch processes at once: in fp32, with their exponentials, they fit into a CPU's cache."""


class TorchKernels:
    def summarise(self, logits: Tensor, temperatures: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
        normalisers, entropies = torch.empty(2, len(logits), dtype=computed_in(logits.dtype), device=logits.device)
        for rows in _blocks(logits):
            scaled = _scaled(logits[rows], temperatures[rows], cap)
            largest = scaled.amax(dim=-1, keepdim=True)
            scaled.sub_(largest)
            weights = scaled.exp()
            total = weights.sum(dim=-1)
            normaliser = total.log()
            normalisers[rows] = largest[:, 0] + normaliser
            entropies[rows] = normaliser - weights.mul_(scaled).sum(dim=-1) / total
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
        for rows in _blocks(logits):
            scaled, temperature = _scaled(logits[rows], temperatures[rows], cap), temperatures[rows, None]
            squeezed = 1 - (scaled * (temperature / cap)).square() if cap else None
            log_p = scaled.sub_(normalisers[rows, None])
            factor = totals[rows, None]
            if entropy_slopes is not None:
                factor = factor + entropy_slopes[rows, None] * (log_p + entropies[rows, None])
            gradient = log_p.exp_().mul_(factor / -temperature)
            if squeezed is not None:
                gradient.mul_(squeezed)
            logits[rows] = gradient
        return logits


def _blocks(logits: Tensor) -> list[slice]:
    """Blocks of rows to process one after another."""
    step = max(1, BLOCK_ELEMENTS // logits.shape[1])
    return [slice(first, first + step) for first in range(0, len(logits), step)]


def _scaled(logits: Tensor, temperatures: Tensor, cap: float | None) -> Tensor:
    """cap(logits) / T, as a new tensor."""
    values = logits.to(computed_in(logits.dtype), copy=True)
    if cap:
        values.div_(cap).tanh_().mul_(cap)
    return values.div_(temperatures[:, None])
