"""Builds a sharded model over the ranks of a mesh from its files. No process ever holds the whole model.

Invariants: parameters are created without storage, sharded, given storage only for their shards, and read slice by slice.
Trained parameters are fp32 master weights; frozen ones have the precision that layers compute in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from roll.config.errors import UserError
from roll.config.schema import LoraConfig
from roll.model import attention
from roll.model.classifier import load_classifier_config
from roll.model.find import ModelSource, first_line
from roll.model.loading import in_precision, load_model_config, readable
from roll.model.lora import Adapters
from roll.model.rope import fix_angles
from roll.model.shard_loading import load_shards
from roll.model.shard_merging import merge_shards
from roll.model.tiny import tiny_model
from roll.model.value_head import ValueModel
from roll.strategy.train.sharded.module import TrainModule, shard
from roll.strategy.train.sharded.process_group import RankGroup

Purpose = Literal["policy", "frozen", "critic", "scorer"]


@dataclass(frozen=True)
class ShardedModel:
    """A model that is sharded over the ranks of a group."""

    module: TrainModule
    """The FSDP root: everything is computed inside its forward pass."""
    model: PreTrainedModel
    dtype: torch.dtype
    """The precision that layers compute in."""
    value: ValueModel | None = None
    """The model with a critic's value head."""
    adapters: Adapters | None = None
    """The adapters in the model, if only they are trained."""


def build_sharded(
    source: ModelSource,
    purpose: Purpose,
    dtype: torch.dtype,
    seed: int,
    group: RankGroup,
    *,
    lora: LoraConfig | None = None,
    on_host: bool = False,
) -> ShardedModel:
    """The model of the files at `source`, or a new one from `seed`, sharded over the group's mesh. With `lora` a policy
    is frozen except for adapters, which are initialised from `seed` with the same values as in a single process."""
    parameter_dtype = dtype if purpose in ("frozen", "scorer") or lora is not None else torch.float32
    model = _empty(source, purpose, parameter_dtype, seed)
    fix_angles(model)
    model.set_attn_implementation(attention.NAME)
    if not attention.takes_plans(model):
        raise UserError(f"model: {source.name!r} is a {type(model).__name__}, whose attention ROLL cannot compute yet")
    model.eval().requires_grad_(purpose in ("policy", "critic") and lora is None)
    adapters = None if lora is None else _with_adapters(model, lora, source, seed)
    value = ValueModel(model) if purpose == "critic" else None
    module = TrainModule(model if value is None else value)
    shard(module, model.get_decoder(), group.meshes, dtype, on_host=on_host, exact=() if value is None else (value.head,))
    host = torch.device("cpu") if on_host else group.device
    module._apply(lambda tensor: torch.empty_like(tensor, device=host) if tensor.is_meta else tensor)  # type: ignore[no-untyped-call]
    _move_buffers(model, group.device)
    model.tie_weights()
    if source.location is not None:
        with readable(source):
            load_shards(model, _folder(source))
    for folder in source.adapters:
        merge_shards(model, Path(folder), dtype)
    if value is not None:
        nn.init.zeros_(value.head.weight)
        nn.init.zeros_(value.head.bias)
    return ShardedModel(module, model, dtype, value, adapters)


def _empty(source: ModelSource, purpose: Purpose, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """The model without storage for its parameters. A model made from scratch has its weights."""
    if source.location is None:
        return in_precision(tiny_model(seed if source.seed is None else source.seed), dtype)
    from accelerate import init_empty_weights

    kind: Any = AutoModelForSequenceClassification if purpose == "scorer" else AutoModelForCausalLM
    shape = load_classifier_config(source) if purpose == "scorer" else load_model_config(source)
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = kind.from_config(shape, dtype=dtype)
    return model


def _with_adapters(model: PreTrainedModel, lora: LoraConfig, source: ModelSource, seed: int) -> Adapters:
    """Adds new adapters to the model. Every rank initialises all of them, and FSDP keeps a shard. They are rounded to the
    model's precision, as in `single`, before they become master weights."""
    with _seen_on_host(model):
        adapters = Adapters(model, lora, source.base(seed), seed)
    for parameter in adapters.parameters().values():
        parameter.data = parameter.data.float()
    return adapters


@contextmanager
def _seen_on_host(model: nn.Module) -> Iterator[None]:
    """While active, parameters without storage appear to be in host memory, each as one expanded number: `peft` creates
    adapters on the device of their layers, and would create them without storage otherwise."""
    parameters = [(part, name, p) for part in model.modules() for name, p in part.named_parameters(recurse=False)]
    empty = [(part, name, parameter) for part, name, parameter in parameters if parameter.is_meta]
    for part, name, parameter in empty:
        number = torch.zeros((), dtype=parameter.dtype)
        part._parameters[name] = nn.Parameter(number.expand(parameter.shape), requires_grad=False)
    try:
        yield
    finally:
        for part, name, parameter in empty:
            part._parameters[name] = parameter


def _move_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Moves the buffers, which are whole on every rank (mostly rotary angles), to the device."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _folder(source: ModelSource) -> Path:
    """The folder of the model's files on this machine; downloads a model of the hub."""
    assert source.location is not None
    if Path(source.location).is_dir():
        return Path(source.location)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source.location, allow_patterns=["*.safetensors", "*.json"]))
    except Exception as error:  # of any kind: no network, no such model, no access
        raise UserError(f"model: {source.name!r} could not be fetched: {first_line(error)}") from error
