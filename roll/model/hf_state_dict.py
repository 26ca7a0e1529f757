"""A model's tensors under the names, and in the layout, of its checkpoints on disk.

Some models have a different layout in memory than on disk (for example fused MoE experts). External engines such as vLLM
expect the on-disk layout.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel


def checkpoint_form(shape: PretrainedConfig, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors as they would be saved, layer by layer: besides the input, at most one layer is copied."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape)
    for _, layer_tensors in groupby(tensors, key=lambda item: _layer(item[0])):
        yield from on_disk_form(model, dict(layer_tensors)).items()


def on_disk_form(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Some of a model's tensors in the on-disk layout; tensors that are one tensor on disk must be given together."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return found


def by_layer(names: Iterable[str]) -> Iterator[list[str]]:
    """The names of each layer, one layer after the other."""
    for _, layer_tensors in groupby(sorted(names, key=_layer), key=_layer):
        yield list(layer_tensors)


def _layer(name: str) -> str:
    """The common prefix of the names of a layer's tensors."""
    found = re.match(r".*?\.\d+\.", name)
    return found[0] if found is not None else ""


def with_tied(shape: PretrainedConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, and the model's tensors that are tied to one of them, under their own names too."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    tied = getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(shape)], "_tied_weights_keys", None) or {}
    found = {name: tensors[source] for name, source in tied.items() if source in tensors and name not in tensors}
    return {**tensors, **found}
