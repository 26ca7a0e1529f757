"""Offloads a sharded trainer: its shards and moments are in host memory while another role needs the GPU.

Invariants: a tensor keeps its values wherever it is, so a checkpoint can be taken at any residency; it stays the same
object, so the optimizer finds its moments. Host memory is pinned and kept for the next offload, because pinning takes
longer than copying. On a CPU nothing moves.

FSDP keeps its own references to the storage of each shard, and learns of a new one by `_apply`, as in `Module.to`. The
tensors are copied before that: all copies are launched, then waited for once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils import swap_tensors

from roll.strategy.offload import Residency

BLOCK_BYTES = 1 << 30
"""PyTorch rounds each pinned allocation up to a power of two: whole blocks of such a size waste nothing."""
_ALIGNED = 512


class ShardOffload:
    def __init__(self, module: nn.Module, device: torch.device) -> None:
        """`module` is the root that `fully_shard` was called on last. If its parameters are in host memory throughout
        (`shard(on_host=True)`), there is nothing to move."""
        self._module, self._device = module, device
        self._moves = any(parameter.device.type == "cuda" for parameter in module.parameters())
        self._memory = PinnedMemory()
        self._buffers: dict[str, Tensor] = {}

    def set_residency(self, level: Residency, own: Mapping[str, Tensor]) -> None:
        """Keeps the tensors named by `level` on the device and the rest in host memory; `own` are the optimizer's tensors
        besides the parameters, by names that stay the same."""
        reshard(self._module)  # gathered parameters are not shards: they would stay on the device
        if self._device.type == "cuda" and self._moves:
            self._move(level, own)
        if self._device.type == "cuda" and level != "all":
            torch.cuda.empty_cache()  # leaves the memory to the other processes on this GPU

    def _move(self, level: Residency, own: Mapping[str, Tensor]) -> None:
        weights = dict(self._module.named_parameters())
        levels: dict[Residency, Mapping[str, Tensor]] = {"none": {}, "weights": weights, "all": {**weights, **own}}
        resident = levels[level]
        offloaded = {name: tensor for name, tensor in levels["all"].items() if name not in resident}
        replace_locals(self._module, own, self._to_host(offloaded) | self._to_device(resident))

    def _to_host(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Pinned copies of the local parts of the tensors that are on the device."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            local = _local(tensor)
            if local.device.type != "cuda":
                continue
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
                buffer = self._buffers[name] = self._memory.like(local)
            found[name] = buffer.copy_(local, non_blocking=True)
        if found:
            torch.cuda.synchronize(self._device)
        return found

    def _to_device(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Device copies of the local parts of the tensors that are not on the device. This includes AdamW's step
        counters, which are created where the parameters are: if the trainer was resumed in host memory, they have never
        been on the device."""
        found = {
            name: _local(tensor).to(self._device, non_blocking=True)
            for name, tensor in tensors.items()
            if _local(tensor).device.type != "cuda"
        }
        if found:
            torch.cuda.synchronize(self._device)
        return found


class PinnedMemory:
    """Pinned host memory in large blocks. It is never freed, but reused."""

    def __init__(self, block_bytes: int = BLOCK_BYTES, *, pinned: bool = True) -> None:
        self._block_bytes, self._pinned = block_bytes, pinned
        self._free: list[Tensor] = []
        """The unused end of each block."""

    def like(self, tensor: Tensor) -> Tensor:
        """Contiguous memory for a tensor of this shape and type."""
        size_bytes = tensor.numel() * tensor.element_size()
        aligned = -(-size_bytes // _ALIGNED) * _ALIGNED
        which = next((i for i, block in enumerate(self._free) if len(block) >= aligned), None)
        if which is None:
            size = max(self._block_bytes, 1 << (aligned - 1).bit_length()) if aligned else self._block_bytes
            self._free.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned))
            which = len(self._free) - 1
        block = self._free[which]
        self._free[which] = block[aligned:]
        return block[:size_bytes].view(tensor.dtype).view(tensor.shape)


def reshard(module: nn.Module) -> None:
    """Frees the gathered parameters of all FSDP modules, so that their parameters are the shards again."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


@torch.no_grad()
def replace_locals(module: nn.Module, own: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """Replaces the local parts of the sharded module's parameters and of the tensors of `own`, by name, with others of
    the same shape. The tensor objects stay the same."""
    shards = {id(weight): new[name] for name, weight in module.named_parameters() if name in new}
    if shards:
        module._apply(  # type: ignore[no-untyped-call]
            lambda tensor: _with_local(tensor, shards[id(tensor)]) if id(tensor) in shards else tensor
        )
    for name, tensor in own.items():
        if name in new and isinstance(tensor, DTensor):
            swap_tensors(tensor, _with_local(tensor, new[name]))  # type: ignore[no-untyped-call]
        elif name in new:
            tensor.data = new[name]


@torch.no_grad()
def _local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    return local


def _with_local(tensor: Tensor, local: Tensor) -> Tensor:
    """A tensor sharded like the given one, with this local part, which may be on the host."""
    if not isinstance(tensor, DTensor):
        return local
    if local.device.type == tensor.device_mesh.device_type:
        cut, size, stride = tensor.placements, tensor.shape, tensor.stride()
        return DTensor.from_local(local, tensor.device_mesh, cut, run_check=False, shape=size, stride=stride)
    made = torch.empty_like(tensor, device=local.device)  # `from_local` would copy it to the mesh's device type
    _local(made).data = local
    return made
