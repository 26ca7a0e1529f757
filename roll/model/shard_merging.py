"""Merges saved adapters into the weights of a sharded model: each rank updates its own rows."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from roll.config.errors import UserError
from roll.model.lora import CONFIG_FILE, WEIGHTS_FILE, base_name, rows_of_delta, without_adapters
from roll.model.settings_file import read_settings
from roll.model.shard_box import local_box

_UNSUPPORTED = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out", "lora_bias")
"""Features that adapters from other sources may have beyond A and B with one scale."""


@torch.no_grad()
def merge_shards(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """Adds saved adapters to the model's parameters, of which this rank has shards, with the result that `peft` gives for
    an unsharded model in `dtype`."""
    config = read_settings(folder / CONFIG_FILE)
    if unknown := [name for name in _UNSUPPORTED if config.get(name)]:
        raise UserError(
            f"model: the adapters in {folder} use {unknown[0]}, which is merged into a model that is whole only: run "
            "`roll export` on them first and write the exported folder, or write strategy: single"
        )
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    parameters = without_adapters(dict(model.named_parameters()))
    with safe_open(folder / WEIGHTS_FILE, "pt") as file:
        for key in file.keys():  # noqa: SIM118
            if ".lora_A." not in key:
                continue
            target = parameters[base_name(key)]
            local = target.to_local() if isinstance(target, DTensor) else target
            if not local.numel():
                continue
            rows, columns = local_box(target)
            a, b = file.get_tensor(key), file.get_tensor(key.replace(".lora_A.", ".lora_B."))
            delta = rows_of_delta(a, b, scale, rows.start, rows.stop)[:, columns]
            local.copy_(local.to(dtype) + delta.to(local.device, dtype))
