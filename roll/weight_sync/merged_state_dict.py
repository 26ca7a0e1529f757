"""The tensors that a model publishes: adapters are merged, and names are those of the model without adapters.

So engines need no LoRA support. A merged tensor is computed on access and kept only until the next one is: publishing
needs memory for one merged tensor, not for a second model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from roll.model.lora import adapted_layers, is_adapter, merged_weight
from roll.weight_sync.weights import named_tensors


def published_tensors(model: PreTrainedModel) -> Mapping[str, Tensor]:
    layers = adapted_layers(model)
    return MergedTensors(model, layers) if layers else named_tensors(model)


def plain_tensors(model: nn.Module, layers: Mapping[str, Any]) -> dict[str, tuple[Tensor, Any]]:
    """The model's tensors without those of its adapters, by the names they have without adapters. Each comes with the
    adapted layer whose weight it is, or None."""
    plain: dict[str, tuple[Tensor, Any]] = {}
    for name, tensor in named_tensors(model).items():
        if is_adapter(name):
            continue
        layer, _, kind = name.rpartition(".base_layer.")
        adapted = layers.get(layer)
        plain[name if adapted is None else f"{layer}.{kind}"] = tensor, adapted if kind == "weight" else None
    return plain


class MergedTensors(Mapping[str, Tensor]):
    """Invariant: repeated accesses to a tensor are bit-identical while the weights do not change."""

    def __init__(self, model: PreTrainedModel, layers: Mapping[str, Any]) -> None:
        plain = plain_tensors(model, layers)
        self._tensors = {name: tensor for name, (tensor, _) in plain.items()}
        self._layers = {name: layer for name, (_, layer) in plain.items() if layer is not None}
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._layers:
            return self._tensors[name]
        if self._last is None or self._last[0] != name:  # a tensor split over several buckets is accessed repeatedly
            self._last = None
            self._last = name, merged_weight(self._layers[name])
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
