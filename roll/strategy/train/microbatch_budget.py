"""How many rows a micro-batch has, and whether its activations are kept or computed twice.

What a row costs is `footprint`'s to say. What all rows may cost is what the device has free, less gradients and moments
that are still to come and two chunks of logits; a fifth is left for fragments.
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
"""A large model's memory ends before; a small one's layers are so quick that the host can hardly feed more of them."""
FEWEST_ROWS = 8192
"""Below this, activations are rather computed twice."""
USED_SHARE = 0.8
GRADIENT_BYTES = 4
MOMENT_BYTES = {"adamw": 8, "adamw_8bit": 2}
"""Both moments of a trained parameter."""

Checkpointing = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class Budget:
    rows: int
    checkpointed: bool


def choose(
    footprint: Footprint, asked_rows: int, checkpointing: Checkpointing, longest: int, spare_bytes: int | None
) -> Budget:
    """The budget for samples of up to `longest` tokens; 0 rows are asked for to have as many as fit. On a CPU free memory
    is not asked for (None)."""
    asked = {"on": True, "off": False, "auto": None}[checkpointing]
    whole = footprint.row_bytes(checkpointed=False)
    if asked_rows or spare_bytes is None:
        rows = asked_rows or CPU_ROWS
        fits = spare_bytes is None or max(rows, longest) * whole <= spare_bytes
        return Budget(rows, asked if asked is not None else not fits)
    kept = min(spare_bytes // whole, MOST_ROWS)
    checkpointed = asked if asked is not None else kept < max(FEWEST_ROWS, longest)
    rows = min(spare_bytes // footprint.row_bytes(checkpointed=checkpointed), MOST_ROWS)
    return Budget(max(rows, 1), checkpointed)


def spare(footprint: Footprint, free_bytes: int, trained: int, optimizer: str, transient_bytes: int = 0) -> int:
    """What of a GPU's free memory activations may take before the first update of so many trained parameters.
    `transient_bytes` is what a sharded model gathers and reduces in a pass."""
    to_come = (GRADIENT_BYTES + MOMENT_BYTES[optimizer]) * trained + transient_bytes
    logits = 2 * footprint.logits_bytes(footprint.chunk_logits(MOST_ROWS)[0])
    return max(int(USED_SHARE * free_bytes) - to_come - logits, 0)


def spare_of(
    model: PreTrainedModel, footprint: Footprint, optimizer: str, device: torch.device, mesh: MeshShape | None = None
) -> int | None:
    """What the GPU that computes the model, or a rank's part of it, has to spare now; None on a CPU."""
    if device.type != "cuda":
        return None
    free: int = torch.cuda.mem_get_info(device)[0]
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if mesh is not None:
        sizes = ShardSizes.of(model, mesh)
        item = footprint.dtype.itemsize
        transient = sizes.gathered_bytes(item) + sizes.reducing_bytes(item)
        return spare(footprint, free, sizes.trained, optimizer, transient)
    trained: int = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return spare(footprint, free, trained, optimizer)
