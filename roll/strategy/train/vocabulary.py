"""What is computed over the whole vocabulary: a chunk of logits to its normalisers and entropies, and to its gradient.

Both come twice: in plain torch, and on CUDA as one Triton kernel each that reads the logits once. All arithmetic is in
fp32 whatever the logits are.
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
        """-p (total + entropy_slope (log p + entropy)) / T for every logit, in the logits' own storage. No entropy
        slopes are zeros."""
        ...


def kernels_for(device: torch.device) -> Kernels:
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from roll.strategy.train.vocabulary_triton import TritonKernels

        return TritonKernels()
    return TorchKernels()


class TorchKernels:
    def summarise(self, logits: Tensor, temperatures: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
        scaled = _scaled(logits, temperatures, cap)
        largest = scaled.amax(dim=-1, keepdim=True)
        scaled.sub_(largest)
        weights = scaled.exp()
        total = weights.sum(dim=-1)
        mean = weights.mul_(scaled).sum(dim=-1) / total
        normaliser = total.log()
        return largest[:, 0] + normaliser, normaliser - mean

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
        scaled = _scaled(logits, temperatures, cap)
        squeezed = 1 - (scaled * (temperatures[:, None] / cap)).square() if cap else None
        log_p = scaled.sub_(normalisers[:, None])
        factor = totals[:, None]
        if entropy_slopes is not None:
            factor = factor + entropy_slopes[:, None] * (log_p + entropies[:, None])
        gradient = log_p.exp_().mul_(factor / -temperatures[:, None])
        if squeezed is not None:
            gradient.mul_(squeezed)
        return logits.copy_(gradient)


def _scaled(logits: Tensor, temperatures: Tensor, cap: float | None) -> Tensor:
    """A new tensor."""
    values = logits.float()
    values = torch.tanh(values / cap) * cap if cap else values
    return values / temperatures[:, None]
