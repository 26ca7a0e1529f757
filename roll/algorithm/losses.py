"""Losses: pure functions from streams of tokens to a loss for every token. None knows how the work is cut."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from roll.algorithm.streams import LossSpec, Streams, TokenLoss
from roll.config.errors import UserError

Loss = Callable[..., TokenLoss]

LARGEST_LOG_RATIO = 20.0
"""A ratio beyond e^20 counts as e^20: finite, so that an advantage of 0 still makes it 0."""


def clipped_ratio(
    streams: Streams,
    *,
    clip_low: float,
    clip_high: float,
    correction_cap: float | None = None,
    kl_coef: float = 0.0,
) -> TokenLoss:
    """-w · min(r A, clip(r, 1 - low, 1 + high) A) + kl_coef · k3, with r = current / proximal.

    w = min(proximal / behaviour, correction_cap) weighs a token by how much likelier the trainer finds it than the
    sampler did; None leaves it out. The KL estimate k3 = e^(ref - current) - (ref - current) - 1 is never negative.
    """
    ratio = torch.exp((streams.current - streams.proximal).clamp(max=LARGEST_LOG_RATIO))
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    gain = torch.minimum(ratio * streams.advantage, clipped * streams.advantage)
    metrics: dict[str, Tensor] = {"clipped": (ratio * streams.advantage > clipped * streams.advantage).float()}
    if correction_cap is not None:
        weight = importance_weight(streams, correction_cap)
        gain = gain * weight
        metrics["correction"] = weight
    loss = -gain
    if kl_coef > 0:
        if streams.ref is None:
            raise ValueError("a KL penalty needs the reference's log-probs: the batch has no column 'ref'")
        kl = kl_k3(streams.current, streams.ref)
        loss = loss + kl_coef * kl
        metrics["kl"] = kl.detach()
    return TokenLoss(loss, metrics)


def importance_weight(streams: Streams, cap: float) -> Tensor:
    """How much likelier the trainer finds a token than the sampler did, at most `cap`."""
    return torch.exp(streams.proximal - streams.behaviour).clamp(max=cap)


def kl_k3(current: Tensor, ref: Tensor) -> Tensor:
    """An estimate of KL(current ‖ ref) from tokens of `current`: unbiased, of low variance, never negative."""
    difference = ref - current
    return torch.exp(difference) - difference - 1


LOSSES: dict[str, Loss] = {"clipped_ratio": clipped_ratio}


def resolve_loss(spec: LossSpec) -> Callable[[Streams], TokenLoss]:
    function: Any = LOSSES.get(spec.name)
    if function is None:
        module, _, name = spec.name.partition(":")
        try:
            function = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            known = ", ".join(LOSSES)
            raise UserError(f"there is no loss {spec.name!r}: write {known} or package.module:function") from error
    return lambda streams: function(streams, **spec.params)
