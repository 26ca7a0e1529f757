"""A shelf: tensors of a GPU laid aside in host memory while another role needs the GPU, and brought back.

What always holds: a tensor laid aside keeps its values, name for name; its host memory is pinned and kept for the next
time, because pinning costs more than copying. On a CPU nothing moves: there host memory is the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

Level = Literal["none", "weights", "all"]
"""What of a role is on its device: nothing, the weights, or all that it works with."""


class TensorOffloader:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    def offload(self, tensors: Mapping[str, Tensor]) -> None:
        """Moves the tensors' values to the host; the tensors themselves stay the same objects."""
        moving = {name: tensor for name, tensor in tensors.items() if tensor.device.type == "cuda"}
        for name, tensor in moving.items():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = self._buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            buffer.copy_(tensor.detach(), non_blocking=True)
        if moving:
            torch.cuda.synchronize(self._device)
        for name, tensor in moving.items():
            tensor.data = self._buffers[name]
        if moving:
            torch.cuda.empty_cache()  # for the other processes on this GPU

    def onload(self, tensors: Mapping[str, Tensor]) -> None:
        """Moves the tensors' values to the device again."""
        if self._device.type != "cuda":
            return
        for tensor in tensors.values():
            if tensor.device.type != "cuda":
                tensor.data = tensor.detach().to(self._device, non_blocking=True)
        torch.cuda.synchronize(self._device)

    def hold(self, level: Level, weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Keeps what the level says on the device; `own` is what is there beside the weights."""
        everything = {**weights, **own}
        kept: Mapping[str, Tensor] = {"all": everything, "weights": dict(weights), "none": {}}[level]
        self.offload({name: tensor for name, tensor in everything.items() if name not in kept})
        self.onload(kept)
