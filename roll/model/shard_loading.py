"""Loads a model's files into a model that may be sharded: each rank reads its own slices, and no process ever holds the
whole model in addition to its own part.

Invariants: besides its shards a rank holds one tensor at a time or, if the model fuses several tensors of the files (the
experts of a layer), those of one layer that it has a part of. Every parameter is read exactly once, or loading fails and
names it.

`transformers` knows how names and layouts on disk map to those in memory. Only this module uses that:
`get_model_conversion_mapping`, `rename_source_key`, and a converter's `add_tensor` and `convert`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from roll.config.errors import UserError
from roll.model.find import shards_of
from roll.model.lora import without_adapters
from roll.model.shard_box import Box, local_box

_INDEX, _FILE = "model.safetensors.index.json", "model.safetensors"


class Tensors(Protocol):
    """Tensors in files, by name, of which parts can be read."""

    def __contains__(self, name: object) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def part(self, name: str, box: Box) -> Tensor: ...


class SafeFolder:
    """The tensors of a folder's safetensors files, by name, read on demand."""

    def __init__(self, folder: Path, file: str = _FILE) -> None:
        """Opens the files of a model, unless another `file` is named."""
        self._folder = folder
        self._open: tuple[str, Any] | None = None
        """The file that was read last. Pages that were read stay in memory until it is closed."""
        if file == _FILE and (folder / _INDEX).is_file():
            self._files: dict[str, str] = json.loads((folder / _INDEX).read_text())["weight_map"]
        elif (folder / file).is_file():
            self._files = dict.fromkeys(self._file(file).keys(), file)
        else:
            raise UserError(
                f"model: {folder} has no {_FILE} and no {_INDEX}, which a sharded trainer reads slices of: save the "
                "model with save_pretrained, or write strategy: single"
            )

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file(self._files[name]).get_slice(name).get_shape())

    def whole(self, name: str) -> Tensor:
        tensor: Tensor = self._file(self._files[name]).get_tensor(name)
        return tensor

    def part(self, name: str, box: Box) -> Tensor:
        if not box:
            return self.whole(name)
        tensor: Tensor = self._file(self._files[name]).get_slice(name)[box]
        return tensor

    def _file(self, name: str) -> Any:
        if self._open is None or self._open[0] != name:
            self._open = None
            self._open = name, safe_open(self._folder / name, "pt")
        return self._open[1]


@torch.no_grad()
def load_shards(model: PreTrainedModel, folder: Path, *, parameters: bool = True) -> None:
    """Reads the folder's weights into the model's parameters and persistent buffers, of which this rank has shards. They
    are the weights of the model without adapters; adapters are not changed. Without `parameters` only the buffers are
    read."""
    targets = without_adapters(model.state_dict(keep_vars=True))
    if not parameters:
        targets = {name: tensor for name, tensor in targets.items() if not isinstance(tensor, nn.Parameter)}
        if not targets:
            return
    shards = shards_of(folder)
    read = _read_files(model, SafeFolder(folder), targets) if shards is None else _read_shards(folder, shards, targets)
    unread = targets.keys() - read
    tied = {name for name in unread if any(targets[name] is targets[other] for other in read)}
    if missing := sorted(unread - tied):
        raise UserError(
            f"model: {folder} has no weights for {missing[0]!r}{f' and {len(missing) - 1} more' if missing[1:] else ''}: "
            f"is it a {type(model).__name__}?"
        )


def _read_files(model: PreTrainedModel, files: SafeFolder, targets: dict[str, Tensor]) -> set[str]:
    """Reads tensors from files as `transformers` writes them. Returns the names of those that were read."""
    read = set()
    for name, found in _sources(model, files, targets).items():
        if name not in targets:
            continue
        if isinstance(found, _FusedTensor):
            first, fused = found.read(model, files, targets[name])
            for target, tensor in fused.items():
                if target in targets:
                    _copy(targets[target], partial(_narrow, tensor, first))
                    read.add(target)
        else:
            _check_shape(name, targets[name], files.shape(found))
            copy_from(files, found, targets[name])
            read.add(name)
    return read


def _read_shards(folder: Path, shards: Path, targets: dict[str, Tensor]) -> set[str]:
    """Reads the shards that a sharded trainer's ranks wrote, under the names that tensors have in memory."""
    from roll.model.shard_folder import ShardedWeights  # imports torch.distributed.checkpoint, which takes long

    weights = ShardedWeights(folder, shards)
    read = [name for name in targets if name in weights]
    for name in read:
        _check_shape(name, targets[name], weights.shape(name))
        copy_from(weights, name, targets[name])
    return set(read)


def _check_shape(name: str, target: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(target.shape) != shape:
        raise UserError(
            f"model: the weights of {name!r} are {list(shape)}, but the model has {list(target.shape)}: do they "
            "belong to another model?"
        )


def copy_from(source: Tensors, name: str, target: Tensor) -> None:
    """Copies this rank's part of a tensor in files."""
    _copy(target, partial(source.part, name))


def _sources(model: PreTrainedModel, files: SafeFolder, targets: dict[str, Tensor]) -> dict[str, Any]:
    """By the name in memory: the name in the files, or the names of several tensors that are fused."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found: dict[str, Any] = {}
    for key in sorted(files, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, targets)
        if pattern is None:
            found[name] = key
            continue
        fused = found.setdefault(name, _FusedTensor(name, by_pattern[pattern], {}))
        fused.keys.setdefault(pattern, []).append(key)
    return found


@dataclass(frozen=True)
class _FusedTensor:
    """A tensor that the model fuses from several in files, such as those of a layer's experts."""

    name: str
    converter: Any
    """A converter of `transformers`."""
    keys: dict[str, list[str]]
    """Names in files in order, by the pattern of the converter that they match."""

    def read(self, model: PreTrainedModel, files: SafeFolder, target: Tensor) -> tuple[int, dict[str, Tensor]]:
        """The fused tensors by their names in memory, starting with the first row that this rank has a part of. For
        experts it reads only its own."""
        rows = self._rows(target)
        if rows.start is not None and rows.start == rows.stop:
            return 0, {self.name: torch.empty(0)}
        converter = deepcopy(self.converter)
        for pattern, keys in self.keys.items():
            for key in keys[rows]:
                converter.add_tensor(self.name, key, pattern, partial(files.whole, key))
        fused = _converted(converter.convert(self.name, model, model.config))
        if rows.start is not None:
            assert len(fused[self.name]) == rows.stop - rows.start, "each tensor of a file is a row"
        return rows.start or 0, fused

    def _rows(self, target: Tensor) -> slice:
        """The rows that this rank has a part of, if each row of the tensor is made of one tensor per pattern."""
        if target.ndim < 3 or any(len(keys) != target.shape[0] for keys in self.keys.values()):
            return slice(None)
        return local_box(target)[0]


def _narrow(whole: Tensor, first: int, box: Box) -> Tensor:
    """A part of a tensor of which only the rows from `first` on are present."""
    if not first:
        return whole[box]
    return whole[(slice(box[0].start - first, box[0].stop - first), *box[1:])]


def _converted(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in tensors.items()}


def _copy(target: Tensor, part: Callable[[Box], Tensor]) -> None:
    """Copies this rank's part of a tensor, or all of it if every rank has the whole."""
    local = target.to_local() if isinstance(target, DTensor) else target
    if local.numel():
        local.copy_(part(local_box(target)))
