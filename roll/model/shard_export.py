"""Exports a model saved by the ranks of a sharded trainer as files that `transformers` loads.

Invariants: one tensor is in memory at a time, read from shards, in the served precision and the on-disk layout; if
several tensors in memory are one tensor on disk, those of one layer. The files are what `save_pretrained` would write of
the whole model.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from roll.model.hf_state_dict import by_layer, on_disk_form
from roll.model.safetensors_writer import SafeFile, TensorForm, file_names, split_into_files, write_index
from roll.model.shard_folder import ShardedWeights

FILE_BYTES = 5 * 10**9
"""Largest size of one file: several files can be copied at the same time, and each can be read by itself."""


@dataclass(frozen=True)
class _Part:
    """Tensors that are read together, by their names in memory, and the corresponding tensors on disk."""

    names: tuple[str, ...]
    files: dict[str, TensorForm]


def export_shards(folder: Path, shards: Path, target: Path, file_bytes: int = FILE_BYTES) -> None:
    """Writes the model of a checkpoint's folder, whose weights are in shards, with its config and tokenizer."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    weights = ShardedWeights(folder, shards)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    parts = list(_parts(model, weights))
    split = split_into_files([part.files for part in parts], file_bytes)
    files = {
        name: [parts[number] for number in numbers] for name, numbers in zip(file_names(len(split)), split, strict=True)
    }
    for name, some in files.items():
        forms = {key: form for part in some for key, form in part.files.items()}
        with SafeFile(target / name, forms) as file:
            for part in some:
                _write(file, model, weights, part)
    if len(files) > 1:
        write_index(target, {name: [part.files for part in some] for name, some in files.items()})


def _parts(model: PreTrainedModel, weights: ShardedWeights) -> Iterator[_Part]:
    """The tensors to read together: a single one, or a layer if a tensor on disk is made of several."""
    for layer in by_layer(weights):
        forms = {name: torch.empty(weights.shape(name), dtype=weights.dtype(name), device="meta") for name in layer}
        each = [_Part((name,), _forms(on_disk_form(model, {name: tensor}))) for name, tensor in forms.items()]
        joined = _Part(tuple(layer), _forms(on_disk_form(model, forms)))
        separate = {name: form for part in each for name, form in part.files.items()}
        yield from each if separate == joined.files else [joined]


def _forms(tensors: dict[str, Tensor]) -> dict[str, TensorForm]:
    return {name: TensorForm.of(tensor) for name, tensor in tensors.items()}


def _write(file: SafeFile, model: PreTrainedModel, weights: ShardedWeights, part: _Part) -> None:
    for name, tensor in on_disk_form(model, {name: weights.whole(name) for name in part.names}).items():
        file.write(name, tensor)
