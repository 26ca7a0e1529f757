"""How a layer of a decoder reads keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Reading:
    """How a layer reads: its scale, how far back it looks, and the cap of its scores."""

    scale: float
    window: int | None = None
    cap: float | None = None


def reading_of(module: nn.Module, scale: float) -> Reading:
    """As the layer's own code has it."""
    config = module.config
    window = getattr(module, "sliding_window", None)
    if getattr(config, "model_type", "") == "mistral":  # its layers do not have it themselves
        window = getattr(config, "sliding_window", None)
    cap = getattr(module, "attn_logit_softcapping", None)
    return Reading(scale, int(window) if window else None, float(cap) if cap else None)
