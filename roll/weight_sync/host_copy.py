"""A copy of a version's tensors in one block of host memory, which processes of this machine map and read in place.

Invariants: the tensors match the specs and are contiguous; readers see every write at once, so the callers coordinate
when to write. The memory is freed with the copy, however its process ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from roll.weight_sync.channel import SharedMemoryChannel, SharedMemoryHandle
from roll.weight_sync.layout import ALIGNMENT, TensorSpec


class HostCopy:
    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.specs = tuple(specs)
        sizes = [-(-spec.nbytes // ALIGNMENT) * ALIGNMENT for spec in specs]
        self._channel = SharedMemoryChannel.create(1, max(sum(sizes), ALIGNMENT))
        memory = self._channel.slot(0)
        self.tensors: Mapping[str, Tensor] = {}
        start = 0
        for spec, size in zip(specs, sizes, strict=True):
            self.tensors[spec.name] = memory[start : start + spec.nbytes].view(spec.dtype).view(spec.shape)
            start += size

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies the values of the tensors; each tensor is looked up once."""
        for name, own in self.tensors.items():
            own.copy_(tensors[name])

    def address(self, named: Mapping[str, Tensor]) -> dict[str, Any]:
        """The location of some of the tensors, under the given names, as plain values: the arguments of `read`."""
        handle, memory = self._channel.handle, self._channel.slot(0)
        pieces = []
        for name, view in named.items():
            offset = view.data_ptr() - memory.data_ptr()
            dtype = str(view.dtype).removeprefix("torch.")
            pieces.append((name, dtype, list(view.shape), offset))
        return {"path": handle.path, "inode": handle.inode, "nbytes": handle.slot_bytes, "pieces": pieces}

    def close(self) -> None:
        self.tensors = {}
        self._channel.close()


def read(path: str, inode: int, nbytes: int, pieces: Sequence[Sequence[Any]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors at an address, by name, as views of the shared memory."""
    memory = SharedMemoryChannel.attach(SharedMemoryHandle(path, inode, 1, nbytes)).slot(0)
    for name, kind, shape, offset in pieces:
        dtype: torch.dtype = getattr(torch, kind)
        size = torch.Size(shape).numel() * dtype.itemsize
        yield name, memory[offset : offset + size].view(dtype).view(shape)
