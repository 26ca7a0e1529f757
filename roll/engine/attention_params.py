"""The attention parameters of a decoder layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import pad


@dataclass(frozen=True)
class AttentionParams:
    """Softmax scale, sliding window (None: unlimited) and soft cap of the scores (None: no cap)."""

    scale: float
    window: int | None = None
    cap: float | None = None


def attention_params_of(module: nn.Module, scale: float) -> AttentionParams:
    """The parameters that the layer's own code uses."""
    config = module.config
    window = getattr(module, "sliding_window", None)
    # the layers of these models do not have the attribute
    if getattr(config, "model_type", "") in ("mistral", "mixtral"):
        window = getattr(config, "sliding_window", None)
    cap = getattr(module, "attn_logit_softcapping", None)
    return AttentionParams(scale, int(window) if window else None, float(cap) if cap else None)


def widened(heads: Tensor, dim: int) -> Tensor:
    """Pads heads with zeros to the cache's head dimension. If keys and values have different sizes, both are stored with
    the larger one: the scores are the same, and the output ends with zeros."""
    return heads if heads.shape[-1] == dim else pad(heads, (0, dim - heads.shape[-1]))
