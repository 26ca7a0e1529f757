"""How a layer of a decoder reads keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import pad


@dataclass(frozen=True)
class AttentionParams:
    """How a layer reads: its scale, how far back it looks, and the cap of its scores."""

    scale: float
    window: int | None = None
    cap: float | None = None


def reading_of(module: nn.Module, scale: float) -> AttentionParams:
    """As the layer's own code has it."""
    config = module.config
    window = getattr(module, "sliding_window", None)
    if getattr(config, "model_type", "") in ("mistral", "mixtral"):  # their layers do not have it themselves
        window = getattr(config, "sliding_window", None)
    cap = getattr(module, "attn_logit_softcapping", None)
    return AttentionParams(scale, int(window) if window else None, float(cap) if cap else None)


def widened(heads: Tensor, dim: int) -> Tensor:
    """Heads as wide as those of the cache, zeros after their end: where keys and values differ in size, both are kept as
    if they did not. Scores are the same, and what is read is followed by zeros."""
    return heads if heads.shape[-1] == dim else pad(heads, (0, dim - heads.shape[-1]))
