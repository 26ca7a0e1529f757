"""Offloads GPU tensors to pinned host memory while another role uses the GPU, and loads them back.

Invariants: an offloaded tensor keeps its values, name by name. Its pinned host buffer is kept for the next offload,
because pinning costs more than copying. On a CPU nothing moves: the device's memory is host memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

Residency = Literal["none", "weights", "all"]
"""Residency of a role on its device: nothing, the weights, or everything it works with."""


class TensorOffloader:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    def offload(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies the tensors' values to the host. The tensor objects stay the same; only their storage changes."""
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
            torch.cuda.empty_cache()  # leaves the memory to the other processes on this GPU

    def onload(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies the tensors' values back to the device."""
        if self._device.type != "cuda":
            return
        for tensor in tensors.values():
            if tensor.device.type != "cuda":
                tensor.data = tensor.detach().to(self._device, non_blocking=True)
        torch.cuda.synchronize(self._device)

    def set_residency(self, level: Residency, weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Moves tensors so that the device holds those named by `level`; `own` are the role's tensors besides the
        weights."""
        everything = {**weights, **own}
        kept: Mapping[str, Tensor] = {"all": everything, "weights": dict(weights), "none": {}}[level]
        self.offload({name: tensor for name, tensor in everything.items() if name not in kept})
        self.onload(kept)
