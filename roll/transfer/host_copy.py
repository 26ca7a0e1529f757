"""A copy of a version's tensors in one piece of host memory, which processes of this machine map and read in place.

What always holds: the tensors are the ones of the specs, contiguous, in memory that every reader sees as it is now; who
writes when is the users' agreement. The memory goes with the copy, however its process ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roll.transfer.channel import SharedMemoryChannel, SharedMemoryHandle
from roll.transfer.layout import ALIGNMENT, TensorSpec


@dataclass(frozen=True)
class Piece:
    """Where one tensor lies, in plain values that any wire carries."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class HostCopy:
    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.specs = tuple(specs)
        offsets: list[int] = []
        end = 0
        for spec in specs:
            offsets.append(end)
            end += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
        self._channel = SharedMemoryChannel.create(1, max(end, ALIGNMENT))
        self._pieces = [
            Piece(spec.name, str(spec.dtype).removeprefix("torch."), spec.shape, offset)
            for spec, offset in zip(specs, offsets, strict=True)
        ]
        memory = self._channel.slot(0)
        self.tensors: Mapping[str, Tensor] = {piece.name: _view(memory, piece) for piece in self._pieces}

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies the values of the tensors, each of which is asked for once."""
        for name, own in self.tensors.items():
            own.copy_(tensors[name])

    @property
    def address(self) -> dict[str, Any]:
        """What a reader finds the tensors by: plain values, the arguments of `read`."""
        handle = self._channel.handle
        pieces = [(piece.name, piece.dtype, list(piece.shape), piece.offset) for piece in self._pieces]
        return {"path": handle.path, "inode": handle.inode, "nbytes": handle.slot_bytes, "pieces": pieces}

    def close(self) -> None:
        self.tensors = {}
        self._channel.close()


def read(path: str, inode: int, nbytes: int, pieces: Sequence[Sequence[Any]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors at an address, by name, in the memory they lie in."""
    memory = SharedMemoryChannel.attach(SharedMemoryHandle(path, inode, 1, nbytes)).slot(0)
    for name, dtype, shape, offset in pieces:
        yield name, _view(memory, Piece(name, dtype, tuple(shape), offset))


def _view(memory: Tensor, piece: Piece) -> Tensor:
    dtype: torch.dtype = getattr(torch, piece.dtype)
    size = dtype.itemsize * torch.Size(piece.shape).numel()
    return memory[piece.offset : piece.offset + size].view(dtype).view(piece.shape)
