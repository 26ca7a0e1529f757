"""Chooses the number of packed tokens per micro-batch, and whether activations are kept or recomputed.

`activation_memory` has the bytes per packed token. The bytes for all of them are the device's free memory minus the
gradients and moments that are still to be allocated and two chunks of logits; a fifth is left for fragmentation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedModel

from roll.cluster.mesh import MeshShape
from roll.strategy.train.activation_memory import Footprint
from roll.strategy.train.sharded.sizes import ShardSizes

CPU_ROWS = 4096
MOST_ROWS = 131_072
"""A large model runs out of memory before this. A small model's layers are so fast that more tokens hardly help."""
FEWEST_ROWS = 8192
"""If fewer fit with all activations kept, activations are recomputed."""
USED_SHARE = 0.8
GRADIENT_BYTES = 4
MOMENT_BYTES = {"adamw": 8, "adamw_8bit": 2}
"""Bytes of both moments per trained parameter."""

Checkpointing = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class Budget:
    rows: int
    checkpointed: bool


def choose(
    footprint: Footprint, set_rows: int, checkpointing: Checkpointing, longest: int, budget_bytes: int | None
) -> Budget:
    """The limit for samples of up to `longest` tokens. With `set_rows` 0, as many packed tokens as fit. On a CPU
    `budget_bytes` is None: free memory is not considered."""
    forced = {"on": True, "off": False, "auto": None}[checkpointing]
    row_bytes = footprint.row_bytes(checkpointed=False)
    if set_rows or budget_bytes is None:
        rows = set_rows or CPU_ROWS
        fits = budget_bytes is None or max(rows, longest) * row_bytes <= budget_bytes
        return Budget(rows, forced if forced is not None else not fits)
    fitting = min(budget_bytes // row_bytes, MOST_ROWS)
    checkpointed = forced if forced is not None else fitting < max(FEWEST_ROWS, longest)
    rows = min(budget_bytes // footprint.row_bytes(checkpointed=checkpointed), MOST_ROWS)
    return Budget(max(rows, 1), checkpointed)


def activation_budget(
    footprint: Footprint, free_bytes: int, trained: int, optimizer: str, transient_bytes: int = 0
) -> int:
    """Bytes of a GPU's free memory that activations may take, before the first update of `trained` parameters.
    `transient_bytes` is what a sharded model gathers and reduces in a pass."""
    reserved = (GRADIENT_BYTES + MOMENT_BYTES[optimizer]) * trained + transient_bytes
    logits = 2 * footprint.logits_bytes(footprint.chunk_logits(MOST_ROWS)[0])
    return max(int(USED_SHARE * free_bytes) - reserved - logits, 0)


def activation_budget_of(
    model: PreTrainedModel, footprint: Footprint, optimizer: str, device: torch.device, mesh: MeshShape | None = None
) -> int | None:
    """Bytes that activations may take on the GPU that computes the model, or a rank's part of it; None on a CPU."""
    if device.type != "cuda":
        return None
    free: int = torch.cuda.mem_get_info(device)[0]
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if mesh is not None:
        sizes = ShardSizes.of(model, mesh)
        item = footprint.dtype.itemsize
        transient = sizes.gathered_bytes(item) + sizes.reducing_bytes(item)
        return activation_budget(footprint, free, sizes.trained, optimizer, transient)
    trained: int = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return activation_budget(footprint, free, trained, optimizer)
