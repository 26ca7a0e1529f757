"""How much of a model each rank of a mesh holds and gathers, counted parameter by parameter.

A parameter is cut along one dimension, and every rank has room for the largest part, numel / dim · ⌈dim / shards⌉.
FSDP gathers a unit at a time: a decoder layer, or the root's own parameters (embedding, last norm, output layer), which
stay gathered from the forward to the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, prod

from torch import nn
from torch.distributed.tensor import DTensor


def cut_dim(shape: Sequence[int], shards: int) -> int:
    """The dimension along which a parameter is cut: the first, but of tensors with an expert dimension the first that
    divides evenly. Cut unevenly, the fullest rank would hold up to twice its share."""
    even = [dim for dim, size in enumerate(shape) if size % shards == 0]
    return even[0] if len(shape) > 2 and even else 0


def local_numel(shape: Sequence[int], shards: int) -> int:
    """Elements of a rank's part of a parameter, padding included."""
    if not shape:
        return 1
    dim = cut_dim(shape, shards)
    return prod(shape) // shape[dim] * ceil(shape[dim] / shards) if shape[dim] else 0


@dataclass(frozen=True)
class ShardSizes:
    """Parameters of a model over so many shards."""

    trained: int
    """Of those that learn, what a rank holds."""
    frozen: int
    """Of the others."""
    layer: int
    """The largest layer, whole."""
    layer_trained: int
    root: int
    """All that is in no layer, whole."""
    root_trained: int
    output_trained: int
    """The output layer, whole, if it learns."""

    @classmethod
    def of(cls, model: nn.Module, layers: Sequence[nn.Module], output: nn.Module | None, shards: int) -> ShardSizes:
        """Of a model with storage or without, cut already or not; parameters that need gradients are those that learn."""
        inside = {id(p) for layer in layers for p in layer.parameters()}
        parameters = list(model.parameters())
        root = [p for p in parameters if id(p) not in inside]
        by_layer = [(sum(map(_numel, layer.parameters())), _trained(layer.parameters())) for layer in layers]
        largest = max(by_layer, default=(0, 0))
        return cls(
            trained=sum(local_numel(p.shape, shards) for p in parameters if p.requires_grad),
            frozen=sum(local_numel(p.shape, shards) for p in parameters if not p.requires_grad),
            layer=largest[0],
            layer_trained=largest[1],
            root=sum(map(_numel, root)),
            root_trained=_trained(root),
            output_trained=0 if output is None else _trained(output.parameters()),
        )

    def gathered_bytes(self, itemsize: int) -> int:
        """The root's parameters, the layer at work and the next one, which is gathered meanwhile."""
        return itemsize * (self.root + 2 * self.layer)

    def reducing_bytes(self, itemsize: int) -> int:
        """Gradients that are whole: a layer's as the backward pass makes them, their fp32 copy that is reduced, and those
        of the output layer, which wait for the rest of the root."""
        return (itemsize + 4) * self.layer_trained + itemsize * self.output_trained


def shards_of(model: nn.Module) -> int | None:
    """Over how many ranks a model's parameters are cut; None if they are whole."""
    first = next(model.parameters(), None)
    return int(first.device_mesh.shape[-1]) if isinstance(first, DTensor) else None


def _numel(parameter: nn.Parameter) -> int:
    return prod(parameter.shape)


def _trained(parameters: Iterable[nn.Parameter]) -> int:
    return sum(_numel(p) for p in parameters if p.requires_grad)
