"""Packing: sequences into rows of tokens without padding, every shared prefix once.

Sequences that begin alike (siblings share their prompt, prompts share their system message, short answers are often the
same) form a tree; each node of it is computed once and used by all sequences through it. A token's hidden state depends
on its ancestors alone, so outputs and gradients are those of separate sequences.

Example: `[1 2 3]`, `[1 2 4]` and `[1 2]` pack into the rows `1 2 3 4`; their paths are `[0 1 2]`, `[0 1 3]` and `[0 1]`;
row 3 (the token 4) attends to rows 0, 1 and 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from roll.data.batch import Indices
from roll.data.tokenlog import IntArray

DENSE_ROWS = 1024
"""Up to this many rows one masked attention over all of them beats one for each sequence."""


@dataclass(frozen=True)
class PrefixTree:
    """Rows of tokens; `paths[i][t]` is the row of token t of sequence i, and `new[i]` how many of its tokens no earlier
    sequence has, which are the rows at the end of its path."""

    ids: IntArray
    positions: IntArray
    paths: list[Indices]
    new: list[int]

    @property
    def rows(self) -> int:
        return len(self.ids)


def pack(sequences: Sequence[IntArray]) -> PrefixTree:
    """The prefix tree of the sequences. Sorted, each shares its longest prefix with the one before it."""
    order = sorted_order(sequences)
    paths: list[Indices] = [np.zeros(0, np.int64)] * len(sequences)
    new = [0] * len(sequences)
    ids: list[IntArray] = []
    positions: list[IntArray] = []
    rows = 0
    before: IntArray = np.zeros(0, np.int32)
    path: Indices = np.zeros(0, np.int64)
    for index in order:
        sequence = sequences[index]
        shared = common_prefix(before, sequence)
        fresh = len(sequence) - shared
        path = np.concatenate([path[:shared], np.arange(rows, rows + fresh)])
        paths[index], new[index] = path, fresh
        ids.append(sequence[shared:])
        positions.append(np.arange(shared, len(sequence), dtype=np.int32))
        rows += fresh
        before = sequence
    return PrefixTree(_concat(ids), _concat(positions), paths, new)


def micro_batches(sequences: Sequence[IntArray], limit_rows: int) -> list[Indices]:
    """Cuts sequences, in sorted order, into runs whose trees have at most `limit_rows` rows (or one sequence)."""
    cuts: list[list[int]] = []
    rows = 0
    before: IntArray = np.zeros(0, np.int32)
    for index in sorted_order(sequences):
        sequence = sequences[index]
        fresh = len(sequence) - common_prefix(before, sequence)
        if cuts and rows + fresh <= limit_rows:
            cuts[-1].append(index)
            rows += fresh
        else:
            cuts.append([index])
            rows = len(sequence)
        before = sequence
    return [np.array(cut, np.int64) for cut in cuts]


def sorted_order(sequences: Sequence[IntArray]) -> list[int]:
    """Lexicographic order of token ids; equal sequences in the order given."""
    keys = [sequence.astype(">i4").tobytes() for sequence in sequences]
    return sorted(range(len(sequences)), key=lambda i: (keys[i], i))


def common_prefix(a: IntArray, b: IntArray) -> int:
    length = min(len(a), len(b))
    differing = np.flatnonzero(a[:length] != b[:length])
    return int(differing[0]) if len(differing) else length


class TreePlan:
    """Attention within a prefix tree: every row sees its ancestors and itself."""

    def __init__(self, tree: PrefixTree, device: torch.device) -> None:
        self._spans: list[tuple[slice, Tensor, Tensor | None]] = []
        self._mask: Tensor | None = None
        if tree.rows <= DENSE_ROWS:
            self._mask = torch.from_numpy(ancestor_mask(tree)).to(device)
            return
        for path, fresh in zip(tree.paths, tree.new, strict=True):
            if fresh == 0:
                continue
            shared = len(path) - fresh
            span = slice(int(path[shared]), int(path[shared]) + fresh)
            ends = torch.arange(shared, len(path), device=device)
            mask = torch.arange(len(path), device=device)[None] <= ends[:, None] if shared else None
            self._spans.append((span, torch.from_numpy(path).to(device), mask))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        repeats = query.shape[0] // key.shape[0]
        key, value = key.repeat_interleave(repeats, 0), value.repeat_interleave(repeats, 0)
        if self._mask is not None:
            out = scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=self._mask, scale=scale)
            return out[0].transpose(0, 1)
        parts: list[Tensor] = []
        for span, path, mask in sorted(self._spans, key=lambda s: s[0].start):
            out = scaled_dot_product_attention(
                query[None, :, span],
                key[None, :, path],
                value[None, :, path],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
            )
            parts.append(out[0])
        return torch.cat(parts, dim=1).transpose(0, 1)


def ancestor_mask(tree: PrefixTree) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """mask[row, other]: whether `other` is the row itself or an ancestor of it."""
    mask = np.zeros((tree.rows, tree.rows), np.bool_)
    for path, fresh in zip(tree.paths, tree.new, strict=True):
        shared = len(path) - fresh
        mask[np.ix_(path[shared:], path)] = np.arange(len(path))[None] <= np.arange(shared, len(path))[:, None]
    return mask


def _concat(parts: list[IntArray]) -> IntArray:
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)
