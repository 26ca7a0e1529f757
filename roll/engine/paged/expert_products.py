"""Expert layers computed by the engine's kernels, for decoders that run by the code of `transformers`.

`transformers` selects the implementation of expert products by name. This one runs on CUDA without synchronising with the
host.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "roll_engine"


def _experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """hidden [rows, dim], index and weights [rows, chosen] → [rows, dim]"""
    from roll.engine.paged import expert_kernels as kernels

    pairs = kernels.sort_by_expert(index, len(module.gate_up_proj))
    outputs = kernels.experts(hidden.contiguous(), pairs, module.gate_up_proj, module.down_proj)
    return (outputs.view(*index.shape, -1) * weights[..., None]).sum(1).to(hidden.dtype)


ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
