"""How many rows a micro-batch has, and whether its activations are kept or computed twice.

The model of memory, for a decoder of the Llama kind: a row keeps in every layer two norms (the input in fp32, the
normalised and the scaled vector), queries, keys, values and output of the attention, and four vectors of the MLP. With
checkpointing it keeps a layer's input, and one layer at a time is there in full. Compiled layers keep less than that.
What a row may cost is what the device has free, less gradients and moments that are still to come and two chunks of
logits; a fifth is left for fragments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from roll.config.schema import TrainConfig
from roll.strategy.train.logprobs import CHUNK_ELEMENTS

CPU_ROWS = 4096
MOST_ROWS = 131_072
"""A large model's memory ends before; a small one's layers are so quick that the host can hardly feed more of them."""
FEWEST_ROWS = 8192
"""Below this, activations are rather computed twice."""
USED_SHARE = 0.8


@dataclass(frozen=True)
class Budget:
    rows: int
    checkpointed: bool


def row_bytes(model: PreTrainedModel, checkpointed: bool) -> int:
    """What a row keeps until its backward pass."""
    shape, size = model.config, model.dtype.itemsize
    heads = shape.num_attention_heads
    dim = getattr(shape, "head_dim", None) or shape.hidden_size // heads
    queries, keys = heads * dim, (getattr(shape, "num_key_value_heads", None) or heads) * dim
    inner = getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size
    norms = 2 * (4 + 2 * size) * shape.hidden_size
    layer = norms + size * (2 * queries + 2 * keys + 4 * inner)
    layers = int(shape.num_hidden_layers)
    kept = layers * size * int(shape.hidden_size) + 2 * layer if checkpointed else (layers + 1) * layer
    return int(kept)


def choose(model: PreTrainedModel, config: TrainConfig, longest: int, free_bytes: int | None) -> Budget:
    """The budget for samples of up to `longest` tokens; on a CPU free memory is not asked for (None)."""
    asked = {"on": True, "off": False, "auto": None}[config.activation_checkpointing]
    if config.micro_batch_tokens or free_bytes is None:
        rows = config.micro_batch_tokens or CPU_ROWS
        fits = free_bytes is None or max(rows, longest) * row_bytes(model, False) <= free_bytes
        return Budget(rows, asked if asked is not None else not fits)
    kept = min(free_bytes // row_bytes(model, False), MOST_ROWS)
    checkpointed = asked if asked is not None else kept < max(FEWEST_ROWS, longest)
    rows = min(free_bytes // row_bytes(model, checkpointed), MOST_ROWS)
    return Budget(max(rows, 1), checkpointed)


def free_bytes(model: PreTrainedModel) -> int | None:
    """What a GPU has for activations, as far as it can be known before the first update; None on a CPU."""
    device = model.device
    if device.type != "cuda":
        return None
    free: int = torch.cuda.mem_get_info(device)[0]
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    trained: int = sum(p.numel() for p in model.parameters() if p.requires_grad)
    gradients_and_moments = (4 + 8) * trained
    logits: int = 2 * CHUNK_ELEMENTS["cuda"] * model.dtype.itemsize
    usable = int(USED_SHARE * free)
    return max(usable - gradients_and_moments - logits, 0)
