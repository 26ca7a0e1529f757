"""Log-probabilities of given tokens, without ever holding [tokens, vocab] for all of them.

The rows a token is predicted from are unique: siblings whose answers begin alike ask the same row for several tokens, and
its logits are computed once. Rows go through the output layer in chunks; where there are several, a chunk's logits are
computed again in the backward pass instead of kept.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from roll.model.attention import logits_of

CHUNK_ELEMENTS = 1 << 24
"""Most logits held at once: 64 MiB in fp32."""


def token_log_probs(
    model: PreTrainedModel, hidden: Tensor, rows: Tensor, targets: Tensor, temperatures: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` predicted from `rows` of hidden [rows, dim] under softmax(logits / temperature), and the
    entropies of those distributions. rows, targets, temperatures [tokens] → two fp32 tensors [tokens], the second
    without a gradient."""
    if not len(rows):
        return hidden.new_zeros(0, dtype=torch.float32), hidden.new_zeros(0, dtype=torch.float32)
    # A distribution is a row at a temperature; tokens are taken in the order of their distributions.
    levels, level = torch.unique(temperatures, return_inverse=True)
    distinct, which = torch.unique(rows * len(levels) + level, return_inverse=True)
    order = torch.argsort(which, stable=True)
    sources, scales = distinct // len(levels), levels[distinct % len(levels)]
    counts = torch.bincount(which, minlength=len(sources))
    ends = torch.cumsum(counts, 0).tolist()
    chunk = max(1, CHUNK_ELEMENTS // int(model.config.vocab_size))
    log_probs, entropies = [], []
    for first in range(0, len(sources), chunk):
        last = min(first + chunk, len(sources))
        members = order[ends[first - 1] if first else 0 : ends[last - 1]]
        picked = hidden.index_select(0, sources[first:last])
        local, wanted = which[members] - first, targets[members]
        if torch.is_grad_enabled() and len(sources) > chunk:
            parts = checkpoint(_chunk, model, picked, scales[first:last], local, wanted, use_reentrant=False)
        else:
            parts = _chunk(model, picked, scales[first:last], local, wanted)
        log_probs.append(parts[0])
        entropies.append(parts[1])
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return torch.cat(log_probs)[back], torch.cat(entropies)[back]


def _chunk(
    model: PreTrainedModel, hidden: Tensor, temperatures: Tensor, local: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    scaled = logits_of(model, hidden) / temperatures[:, None]
    normaliser = torch.logsumexp(scaled, dim=-1)
    log_probs = scaled[local, targets] - normaliser[local]
    with torch.no_grad():
        entropy = normaliser - (torch.exp(scaled - normaliser[:, None]) * scaled).sum(dim=-1)
    return log_probs, entropy[local]


def response_positions(
    loss_mask: np.ndarray[tuple[int], np.dtype[np.bool_]],
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Where a sample's trained tokens are. The first token of a sequence has nothing to be predicted from."""
    where = np.flatnonzero(loss_mask)
    if len(where) and where[0] == 0:
        raise ValueError("the first token of a sample is marked as sampled: a token log begins with a prompt")
    return where
