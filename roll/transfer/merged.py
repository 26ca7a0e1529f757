"""What a model publishes: its tensors, with adapters merged, under the names that it has without adapters.

So engines need not know of adapters. A merged tensor is made when it is asked for and kept no longer than until the next
one is: publishing needs room for one of them, not for a second model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from roll.model.lora import adapted_layers, is_adapter, merged_weight
from roll.transfer.weights import named_tensors


def published_tensors(model: PreTrainedModel) -> Mapping[str, Tensor]:
    layers = adapted_layers(model)
    return MergedTensors(model, layers) if layers else named_tensors(model)


class MergedTensors(Mapping[str, Tensor]):
    """What always holds: a tensor is the same bits however often it is asked for, while the weights stay."""

    def __init__(self, model: PreTrainedModel, layers: Mapping[str, Any]) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._layers: dict[str, Any] = {}
        for name, tensor in named_tensors(model).items():
            if is_adapter(name):
                continue
            layer, _, kind = name.rpartition(".base_layer.")
            plain = f"{layer}.{kind}" if layer in layers else name
            self._tensors[plain] = tensor
            if layer in layers and kind == "weight":
                self._layers[plain] = layers[layer]
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._layers:
            return self._tensors[name]
        if self._last is None or self._last[0] != name:  # one that is cut over several buckets is asked for again
            self._last = None
            self._last = name, merged_weight(self._layers[name])
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
