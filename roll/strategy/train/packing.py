"""Packing: sequences into rows of tokens without padding, every shared prefix once.

Sequences that begin alike (siblings share their prompt, prompts share their system message, short answers are often the
same) form a tree; each node of it is computed once and used by all sequences through it. A token's hidden state depends
on its ancestors alone, so outputs and gradients are those of separate sequences.

Example: `[1 2 3]`, `[1 2 4]` and `[1 2]` pack into the rows `1 2 3 4`; their paths are `[0 1 2]`, `[0 1 3]` and `[0 1]`;
row 3 (the token 4) attends to rows 0, 1 and 3.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from roll.data.columns import Indices
from roll.data.tokenlog import IntArray, common_prefix


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


class TreePlan:
    """Attention within a prefix tree: every row sees its ancestors and itself.

    A sequence's new rows are the queries of one attention over its whole path. Attentions of similar size are computed
    together, padded to a common size; padding is never read.
    """

    def __init__(self, tree: PrefixTree, device: torch.device) -> None:
        buckets: dict[tuple[int, int], list[Span]] = defaultdict(list)
        for path, fresh in zip(tree.paths, tree.new, strict=True):
            if fresh:
                buckets[_size_class(fresh), _size_class(len(path))].append(Span(path, fresh))
        self._buckets = [Bucket(spans, device) for _, spans in sorted(buckets.items())]
        order = np.concatenate([span.path[-span.fresh :] for bucket in self._buckets for span in bucket.spans])
        self._back = torch.from_numpy(np.argsort(order)).to(device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))  # [rows, heads, dim]
        parts = [bucket.attend(query, key, value, scale) for bucket in self._buckets]
        return torch.cat(parts).index_select(0, self._back)


@dataclass(frozen=True)
class Span:
    """The new rows of one sequence: the last `fresh` of its path."""

    path: Indices
    fresh: int


class Bucket:
    """Spans whose attentions are computed together: [spans, queries] over [spans, keys]."""

    def __init__(self, spans: list[Span], device: torch.device) -> None:
        self.spans = spans
        queries, keys = max(s.fresh for s in spans), max(len(s.path) for s in spans)
        query_rows = np.zeros((len(spans), queries), np.int64)
        key_rows = np.zeros((len(spans), keys), np.int64)
        visible = np.zeros((len(spans), queries, keys), np.bool_)
        visible[:, :, 0] = True  # a padded query must see something; its output is dropped
        for i, span in enumerate(spans):
            query_rows[i, : span.fresh] = span.path[-span.fresh :]
            key_rows[i, : len(span.path)] = span.path
            ends = np.arange(len(span.path) - span.fresh, len(span.path))
            visible[i, : span.fresh] = np.arange(keys)[None] <= ends[:, None]
        real = np.arange(queries)[None] < np.array([s.fresh for s in spans])[:, None]
        self._query_rows, self._key_rows, self._visible, self._real = (
            torch.from_numpy(a).to(device) for a in (query_rows, key_rows, visible, np.flatnonzero(real))
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [rows, heads, dim], key and value [rows, kv_heads, dim] → outputs of the spans' rows, in their order.

        The heads that share keys become more queries of one attention, so that keys are not repeated.
        """
        (spans, queries), (_, heads, dim), kv_heads = self._query_rows.shape, query.shape, key.shape[1]
        repeats = heads // kv_heads
        asked = _rows(query, self._query_rows).view(spans, queries, kv_heads, repeats, dim).permute(0, 2, 3, 1, 4)
        out = scaled_dot_product_attention(
            asked.reshape(spans, kv_heads, repeats * queries, dim),
            _rows(key, self._key_rows).transpose(1, 2),
            _rows(value, self._key_rows).transpose(1, 2),
            attn_mask=self._visible.repeat(1, repeats, 1)[:, None],
            scale=scale,
        )
        rows = out.view(spans, kv_heads, repeats, queries, dim).permute(0, 3, 1, 2, 4).reshape(-1, heads, dim)
        return rows.index_select(0, self._real)


def _rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """tensor[rows] for any shape of rows, with a backward pass that is several times faster on a CPU."""
    return tensor.index_select(0, rows.flatten()).view(*rows.shape, *tensor.shape[1:])


def _size_class(size: int) -> int:
    """Sizes within a factor of two of each other, and all small ones, count as similar."""
    return max(size, 16).bit_length()


def _concat(parts: list[IntArray]) -> IntArray:
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)
