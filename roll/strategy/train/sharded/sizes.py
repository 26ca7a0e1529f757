"""How much of a model each rank of a mesh holds and gathers, counted parameter by parameter.

Layers are divided over `tensor`, experts over `expert`. FSDP shards a rank's part of a parameter along one dimension, and
every rank allocates the largest shard, numel / dim · ⌈dim / ranks⌉. FSDP gathers one unit at a time: a decoder layer, or
the root's own parameters (embedding, last norm, output layer), which stay gathered from the forward to the backward pass.
With `tensor` or `expert` the experts of a layer are a unit of their own, and the rest of the layer is another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, lcm, prod

from torch import nn
from transformers import PreTrainedModel

from roll.cluster.mesh import MeshShape
from roll.model.experts import experts_of
from roll.model.shape import ModelShape
from roll.strategy.train.sharded.tensor import divided_dims


def shard_dim(shape: Sequence[int], shards: int) -> int:
    """The dimension along which a parameter is sharded: the first, but for tensors with an expert dimension the first
    that divides evenly. With an uneven split, the fullest rank would hold up to twice its share."""
    even = [dim for dim, size in enumerate(shape) if size % shards == 0]
    return even[0] if len(shape) > 2 and even else 0


def local_numel(shape: Sequence[int], shards: int) -> int:
    """Elements of a rank's shard of a parameter, padding included."""
    if not shape:
        return 1
    dim = shard_dim(shape, shards)
    return prod(shape) // shape[dim] * ceil(shape[dim] / shards) if shape[dim] else 0


@dataclass(frozen=True)
class ShardSizes:
    """Parameter counts of a model over the ranks of a mesh."""

    trained: int
    """Trained parameters per rank."""
    frozen: int
    """Frozen parameters per rank."""
    layer: int
    """The largest layer, before FSDP shards it."""
    layer_trained: int
    apart: int
    """The part of that layer that is experts in a unit of their own."""
    apart_trained: int
    root: int
    """All parameters outside the layers, before FSDP shards them."""
    root_trained: int
    output_trained: int
    """The output layer, before FSDP shards it, if it is trained."""

    @classmethod
    def of(cls, model: PreTrainedModel, mesh: MeshShape, *more: nn.Module) -> ShardSizes:
        """The sizes of a model with or without storage, sharded or not, and of `more` modules beside it. Parameters that
        require gradients are the trained ones."""
        divided = _Divided(model, mesh)
        layers = list(model.get_decoder().layers)
        inside = {id(p) for layer in layers for p in layer.parameters()}
        parameters = list({id(p): p for part in (model, *more) for p in part.parameters()}.values())
        root = [p for p in parameters if id(p) not in inside]
        largest = max(map(divided.unit_sizes, layers), default=(0, 0, 0, 0))
        output = model.get_output_embeddings()
        return cls(
            trained=sum(divided.local(p) for p in parameters if p.requires_grad),
            frozen=sum(divided.local(p) for p in parameters if not p.requires_grad),
            layer=largest[0],
            layer_trained=largest[1],
            apart=largest[2],
            apart_trained=largest[3],
            root=divided.numel(root),
            root_trained=divided.trained(root),
            output_trained=0 if output is None else divided.trained(output.parameters()),
        )

    def gathered_bytes(self, itemsize: int) -> int:
        """The root's parameters, the current layer's and those of the next unit, which is prefetched."""
        return itemsize * (self.root + 2 * self.layer - self.apart)

    def reducing_bytes(self, itemsize: int) -> int:
        """The most unreduced gradients at any moment."""
        return max(self.waiting_bytes(itemsize), self.first_bytes(itemsize), self.second_bytes(itemsize))

    def waiting_bytes(self, itemsize: int) -> int:
        """Unreduced gradients before the backward pass of a layer: the fp32 copy of the following layer (its last unit)
        that is being reduced, and the gradients of the output layer, which wait for the rest of the root."""
        return 4 * (self.layer_trained - self.apart_trained) + itemsize * self.output_trained

    def first_bytes(self, itemsize: int) -> int:
        """While the layer's first gradients are computed: those of its experts if they are a unit, else all of them."""
        return self.waiting_bytes(itemsize) + itemsize * (self.apart_trained or self.layer_trained)

    def second_bytes(self, itemsize: int) -> int:
        """While the gradients of the rest of the layer are computed, if experts are a unit, whose gradients are then
        being reduced."""
        rest = self.layer_trained - self.apart_trained
        return itemsize * (rest + self.output_trained) + 4 * (self.apart_trained or rest)


def of_rank(shape: ModelShape, mesh: MeshShape) -> ModelShape:
    """The shape that one rank computes if packed tokens are divided over `context` and layers over `tensor`: dimensions
    are reduced as if the rank had a part of the width of all tokens."""
    context, heads = mesh.context, mesh.context * (mesh.tensor if shape.divides_heads else 1)
    sorted_twice, exchanged = mesh.expert * mesh.tensor > 1, mesh.expert > 1  # by `experts`, and within its products
    return replace(
        shape,
        hidden=ceil(shape.hidden / context),
        inner=ceil(shape.inner / (context * mesh.tensor)),
        heads=ceil(shape.heads / heads),
        kv_heads=lcm(shape.kv_heads * context // heads, context) // context,
        vocab=ceil(shape.vocab / (context * mesh.tensor)),
        routed=ceil(shape.routed / (context * mesh.tensor)),
        routed_tensors=shape.routed_tensors + sorted_twice + exchanged,
        swaps_heads=context > 1,
    )


class _Divided:
    """What a rank has of each parameter before and after FSDP shards it."""

    def __init__(self, model: PreTrainedModel, mesh: MeshShape) -> None:
        self._mesh = mesh
        named = dict(model.named_parameters(remove_duplicate=False))
        dims = divided_dims(model) if mesh.tensor > 1 else {}
        self._tensor = {id(named[name]): dim for name, dim in dims.items()}
        apart = mesh.tensor * mesh.expert > 1
        self._experts = {id(p) for part in experts_of(model) for p in part.parameters()} if apart else set()

    def local(self, parameter: nn.Parameter) -> int:
        expert = id(parameter) in self._experts
        return local_numel(self._shape(parameter), self._mesh.expert_cuts if expert else self._mesh.cuts)

    def numel(self, parameters: Iterable[nn.Parameter]) -> int:
        return sum(prod(self._shape(p)) for p in parameters)

    def trained(self, parameters: Iterable[nn.Parameter]) -> int:
        return self.numel(p for p in parameters if p.requires_grad)

    def unit_sizes(self, layer: nn.Module) -> tuple[int, int, int, int]:
        """Parameters of a layer, the trained ones among them, and both counts for its experts if they are a unit of their
        own."""
        own = list(layer.parameters())
        apart = [p for p in own if id(p) in self._experts]
        return self.numel(own), self.trained(own), self.numel(apart), self.trained(apart)

    def _shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        shape = list(parameter.shape)
        if id(parameter) in self._experts:
            shape[0] = ceil(shape[0] / self._mesh.expert)
        elif (dim := self._tensor.get(id(parameter))) is not None:
            shape[dim] = ceil(shape[dim] / self._mesh.tensor)
        return tuple(shape)
