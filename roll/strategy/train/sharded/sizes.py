"""How much of a model each rank of a mesh holds and gathers, counted parameter by parameter.

Parameters of layers are divided over `tensor`, experts over `expert`. What a rank then has of a parameter is cut along
one dimension, and every rank has room for the largest part, numel / dim · ⌈dim / ranks⌉. FSDP gathers a unit at a time: a
decoder layer, or the root's own parameters (embedding, last norm, output layer), which stay gathered from the forward to
the backward pass. With `tensor` or `expert` a layer's experts are a unit of their own, and the rest of the layer is one.
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
    """Parameters of a model over the ranks of a mesh."""

    trained: int
    """Of those that learn, what a rank holds."""
    frozen: int
    """Of the others."""
    layer: int
    """The largest layer, before FSDP cuts it."""
    layer_trained: int
    apart: int
    """What of that layer are experts that are a unit of their own."""
    apart_trained: int
    root: int
    """All that is in no layer, before FSDP cuts it."""
    root_trained: int
    output_trained: int
    """The output layer, before FSDP cuts it, if it learns."""

    @classmethod
    def of(cls, model: PreTrainedModel, mesh: MeshShape, *more: nn.Module) -> ShardSizes:
        """Of a model with storage or without, cut already or not, and of `more` modules beside it; parameters that need
        gradients are those that learn."""
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
        """The root's parameters, the layer at work and the next unit, which is gathered meanwhile."""
        return itemsize * (self.root + 2 * self.layer - self.apart)

    def reducing_bytes(self, itemsize: int) -> int:
        """Gradients that are whole, at most."""
        return max(self.before_bytes(itemsize), self.first_bytes(itemsize), self.second_bytes(itemsize))

    def before_bytes(self, itemsize: int) -> int:
        """Before the backward pass of a layer: of the layer after it the fp32 copy that is reduced (of the last of its
        units), and those of the output layer, which wait for the rest of the root."""
        return 4 * (self.layer_trained - self.apart_trained) + itemsize * self.output_trained

    def first_bytes(self, itemsize: int) -> int:
        """While the layer's own gradients are made: of experts, if they are a unit, else of all of it."""
        return self.before_bytes(itemsize) + itemsize * (self.apart_trained or self.layer_trained)

    def second_bytes(self, itemsize: int) -> int:
        """While those of the rest of it are made, if experts are a unit, whose gradients are then reduced."""
        rest = self.layer_trained - self.apart_trained
        return itemsize * (rest + self.output_trained) + 4 * (self.apart_trained or rest)


def of_rank(shape: ModelShape, mesh: MeshShape) -> ModelShape:
    """What one rank computes of each row, where rows are divided over `context` and layers over `tensor`: as wide as a
    part of each row would be, if the rank had that of all rows."""
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
    """What a rank has of each parameter before FSDP cuts it, and after."""

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
        """Of a layer, of those of it that learn, and the same of its experts if they are a unit of their own."""
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
