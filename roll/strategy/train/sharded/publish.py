"""The tensors that a sharded trainer publishes: the same as `single`, from shards, in the serving precision.

Invariants: names, shapes, precisions and bytes are those that one process with the whole model would publish. No rank
ever holds a whole tensor for it, except for the adapters of one layer. In a mesh with replicas, the ranks of the first
replica contribute all bytes.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from roll.model.lora import adapted_layers, adapter_weights, block_rows, delta_rows, scale_of
from roll.model.shard_box import Box, local_box
from roll.strategy.train.sharded.module import TrainModule
from roll.strategy.train.sharded.process_group import RankGroup
from roll.weight_sync.layout import TensorSpec
from roll.weight_sync.merged_state_dict import plain_tensors
from roll.weight_sync.shards import Shard, ShardedTensors


def sharded_source(module: TrainModule, group: RankGroup, dtype: torch.dtype) -> ShardedTensors:
    """The current weights, to be published in `dtype`. Every version needs a new source, which all ranks create
    together."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # a forward pass leaves the root's parameters gathered
    model = module.model
    assert isinstance(model, PreTrainedModel)
    plain = plain_tensors(model, adapted_layers(model))
    specs = [
        TensorSpec(name, served_dtype(model, name, tensor, dtype), tuple(tensor.shape))
        for name, (tensor, _) in plain.items()
    ]
    assert dist.group.WORLD is not None
    return ShardedTensors(specs, _Shards(plain, specs, group), dist.group.WORLD, group.device)


def served_dtype(model: PreTrainedModel, name: str, tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The precision in which an engine holds a tensor when it loads the model in `dtype`: `transformers` keeps some
    tensors of a few models in fp32."""
    if not tensor.dtype.is_floating_point:
        return tensor.dtype
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or () if dtype != torch.float32 else ()
    return torch.float32 if any(re.search(pattern.replace("*", ".*"), name) for pattern in kept) else dtype


class _Shards:
    """This rank's part of each tensor, by name. Only the adapters of one layer are kept at a time."""

    def __init__(self, plain: dict[str, tuple[Tensor, Any]], specs: list[TensorSpec], group: RankGroup) -> None:
        self._plain = plain
        self._dtypes = {spec.name: spec.dtype for spec in specs}
        self._group = group
        self._last: tuple[str, _Merged] | None = None

    def __call__(self, name: str) -> Shard:
        tensor, layer = self._plain[name]
        shape, dtype = tuple(tensor.shape), self._dtypes[name]
        if self._group.replica > 0:
            return Shard.empty(dtype)
        box = local_box(tensor)
        if not self._contributes(tensor):
            return Shard.empty(dtype)
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        if layer is None:
            return Shard.of(shape, box, local.contiguous(), dtype)
        if self._last is None or self._last[0] != name:  # a tensor that spans several buckets is requested again
            self._last = None
            self._last = name, _Merged(local, box, layer, dtype, self._group.device)
        return Shard.reading(shape, box, dtype, self._last[1])

    def _contributes(self, tensor: Tensor) -> bool:
        """Whether this is the first rank with this part. Ranks over which a tensor is not sharded have the same part."""
        if not isinstance(tensor, DTensor):  # a buffer: every rank has all of it
            return self._group.is_first
        mesh = tensor.device_mesh
        repeated = self._group.rank % self._group.shape.tensor if mesh == self._group.mesh else 0
        axes = [axis for axis, placed in enumerate(tensor.placements) if isinstance(placed, Replicate)]
        return not repeated and all(mesh.get_local_rank(axis) == 0 for axis in axes)


class _Merged:
    """Elements of this rank's part of W + scale · B A. The constructor gathers A and B from all ranks."""

    def __init__(self, base: Tensor, box: Box, layer: Any, dtype: torch.dtype, device: torch.device) -> None:
        self._base, self._begin, self._columns, self._scale = base, box[0].start, box[1], scale_of(layer)
        self._a, self._b = (_whole(weight.detach(), dtype, device) for weight in adapter_weights(layer))
        self._delta: tuple[int, Tensor] | None = None

    def __call__(self, start: int, end: int) -> Tensor:
        inputs = self._base.shape[1]
        first, last = start // inputs, -(-end // inputs)  # of this rank's rows
        block, merged, row = block_rows(self._a.shape[1]), [], first
        while row < last:
            at = (self._begin + row) // block * block
            upto = min(last, at + block - self._begin)
            delta = self._block(at)[self._begin + row - at : self._begin + upto - at, self._columns]
            merged.append(self._base[row:upto].to(delta) + delta)
            row = upto
        flat = torch.cat(merged).view(-1)
        return flat[start - first * inputs : end - first * inputs]

    def _block(self, at: int) -> Tensor:
        if self._delta is None or self._delta[0] != at:
            self._delta = None
            self._delta = at, delta_rows(self._a, self._b, self._scale, at)
        return self._delta[1]


def _whole(weight: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The whole matrix of an adapter, rounded as layers compute with it, on every rank."""
    assert isinstance(weight, DTensor)
    local = weight.to_local().to(device, dtype)
    rounded = DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
    whole: Tensor = rounded.full_tensor()
    return whole
