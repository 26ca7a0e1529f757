"""A model's tensors under the names, and in the pieces, that its checkpoints have.

`transformers` holds some models otherwise in memory than in files: the experts of a layer as one tensor, say. Engines of
others read what is in files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig


def checkpoint_form(shape: PretrainedConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as they would be saved, without a copy where that is possible. Tied ones stay as they are given."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape)
    saved: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return saved


def with_tied(shape: PretrainedConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, and those of the model that are tied to one of them, under their own names too."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    tied = getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(shape)], "_tied_weights_keys", None) or {}
    found = {name: tensors[source] for name, source in tied.items() if source in tensors and name not in tensors}
    return {**tensors, **found}
