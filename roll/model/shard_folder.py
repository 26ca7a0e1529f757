"""Reads the tensors of a checkpoint written by the ranks of a sharded trainer, on demand.

Invariants: besides the requested part, one chunk is in memory: one rank's shard of one tensor. Reading needs no other
process: any number of ranks, or a single process, reads the parts it needs of files written by any number of ranks.

Names are `master/NAME`, `exp_avg/NAME` and so on for trained parameters, and `model/NAME` for the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from roll.config.errors import RunError
from roll.model.find import SHARDS_INDEX
from roll.model.shard_box import Box

MASTER, FROZEN = "master/", "model/"


class ShardFolder:
    """The tensors of a folder written by `torch.distributed.checkpoint`, by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = FileSystemReader(folder)
        try:
            metadata = self._reader.read_metadata()
        except Exception as error:  # a damaged pickle fails in many ways
            raise RunError(f"{folder / SHARDS_INDEX} cannot be read: {_first_line(error)}") from error
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        found = metadata.state_dict_metadata
        self._tensors = {name: each for name, each in found.items() if isinstance(each, TensorStorageMetadata)}

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].size)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].properties.dtype

    def whole(self, name: str) -> Tensor:
        return self._read(name, (0,) * len(self.shape(name)), self.shape(name))

    def part(self, name: str, box: Box) -> Tensor:
        return self._read(name, tuple(each.start for each in box), tuple(each.stop - each.start for each in box))

    def _read(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        saved = self._tensors[name]
        target = torch.empty(sizes, dtype=saved.properties.dtype)
        wanted = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        items = create_read_items_for_chunk_list(name, saved, [wanted])
        covered = sum(torch.Size(item.lengths).numel() for item in items)
        if covered != target.numel():
            raise RunError(f"the shards in {self._folder} have {covered} of {target.numel()} values of {name}")
        for item in items:
            try:
                self._reader.read_data(LoadPlan([item]), _Into(target))  # its future is done already
            except Exception as error:  # a damaged zip file, or a pickle in it, fails in many ways
                raise RunError(f"{name} cannot be read from {self._file_of(item)}: {_first_line(error)}") from error
        return target

    def _file_of(self, item: ReadItem) -> Path:
        """The file that has, or should have, a part of a tensor."""
        stored = self._reader.storage_data.get(item.storage_index)
        return self._folder / (SHARDS_INDEX if stored is None else stored.relative_path)


class _Into(DefaultLoadPlanner):
    """Reads into one given tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self._target
        for dim, (begin, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, begin, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: the data was read into the target's own storage."""


class ShardedWeights:
    """The weights of a model folder whose tensors are in the shards beside it: trained ones as masters rounded to the
    served precision, frozen ones as they are."""

    def __init__(self, folder: Path, shards: Path) -> None:
        self._shards = ShardFolder(shards)
        self._served = served_dtype(folder)
        self._names = {name.removeprefix(MASTER): name for name in self._shards if name.startswith(MASTER)}
        self._names |= {name.removeprefix(FROZEN): name for name in self._shards if name.startswith(FROZEN)}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shards.shape(self._names[name])

    def dtype(self, name: str) -> torch.dtype:
        """The precision in which it is read."""
        found = self._names[name]
        return self._served if found.startswith(MASTER) else self._shards.dtype(found)

    def whole(self, name: str) -> Tensor:
        return self._as_served(name, self._shards.whole(self._names[name]))

    def part(self, name: str, box: Box) -> Tensor:
        return self._as_served(name, self._shards.part(self._names[name], box))

    def _as_served(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype(name))


def served_dtype(folder: Path) -> torch.dtype:
    """The precision that a model folder's config names."""
    settings: dict[str, Any] = json.loads((folder / "config.json").read_text())
    dtype: torch.dtype = getattr(torch, settings["dtype"])
    return dtype


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
