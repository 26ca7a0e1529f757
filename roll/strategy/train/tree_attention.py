"""Attention within a prefix tree: every packed token attends to its ancestors and itself.

A span is the new packed tokens of one sequence: the queries of one attention over the sequence's whole path. On CUDA in
16 bits all spans of a layer are one call of variable-length flash attention; elsewhere spans of similar size are computed
together, padded to a common size, and padding is never read.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from roll.data.remote_columns import Indices
from roll.model.attention import AttentionPlan
from roll.strategy.train.packing import PrefixTree
from roll.strategy.train.target_index import on_device

_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""Before torch 2.13, `varlen_attn` supports grouped-query attention without an argument."""

_WIDE_KEYS = 256
"""Up to this many keys, a CPU attends in fp32."""


@dataclass(frozen=True)
class AttentionSpan:
    """The new packed tokens of one sequence: the last `fresh` of its path."""

    path: Indices
    fresh: int


def tree_plan(tree: PrefixTree, device: torch.device, dtype: torch.dtype) -> AttentionPlan:
    """The fastest attention plan for a model of that precision on that device."""
    varlen = attends_varlen(device.type, dtype)
    return VarlenPlan(tree, device) if varlen else BucketPlan(tree, device, dtype)


def attends_varlen(device: str, dtype: torch.dtype) -> bool:
    """Whether all spans are one call, without padding or a mask."""
    return device == "cuda" and dtype in (torch.bfloat16, torch.float16)


def attends_in(device: str, dtype: torch.dtype, keys: int) -> torch.dtype:
    """The precision of a padded attention over this many keys: for few keys, torch's backward pass in 16 bits is slower
    on a CPU than in fp32."""
    return torch.float32 if device == "cpu" and dtype.itemsize == 2 and keys <= _WIDE_KEYS else dtype


def spans_of(tree: PrefixTree) -> list[AttentionSpan]:
    """All spans in the order of their packed tokens."""
    spans = [AttentionSpan(path, fresh) for path, fresh in zip(tree.paths, tree.new, strict=True) if fresh]
    return sorted(spans, key=lambda span: int(span.path[-span.fresh]))


class VarlenPlan:
    """One call per layer. The packed tokens of a tree are its spans one after the other, so queries and outputs stay in
    place; keys and values are gathered along the paths, or stay in place too if nothing is shared."""

    def __init__(self, tree: PrefixTree, device: torch.device) -> None:
        spans = spans_of(tree)
        queries, keys = [s.fresh for s in spans], [len(s.path) for s in spans]
        shared = queries != keys
        self._query_ends = _ends(queries, device)
        self._key_ends = _ends(keys, device) if shared else self._query_ends
        self._key_rows = on_device(np.concatenate([s.path for s in spans]), device) if shared else None
        self._most_queries, self._most_keys = max(queries), max(keys)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))  # [rows, heads, dim]
        if self._key_rows is not None:
            key, value = _gathered(key, self._key_rows), _gathered(value, self._key_rows)
        out = varlen_attn(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            self._query_ends,
            self._key_ends,
            self._most_queries,
            self._most_keys,
            scale=scale,
            window_size=(-1, 0),  # causal; a span's last query sees its last key
            **_GROUPED,
        )
        assert isinstance(out, Tensor)
        return out


def _ends(sizes: list[int], device: torch.device) -> Tensor:
    return on_device(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32), device)


def _gathered(tensor: Tensor, rows: Tensor) -> Tensor:
    """tensor[rows]; the gradients of a packed token, one per sequence that uses it, are summed in fp32."""
    return tensor.float().index_select(0, rows).to(tensor.dtype)


class BucketPlan:
    """Padded attentions of similar size, computed together: [spans, queries] over [spans, keys].

    No two micro-batches have the same buckets, so compilation skips this function; otherwise a layer would be recompiled
    for each micro-batch.
    """

    def __init__(self, tree: PrefixTree, device: torch.device, dtype: torch.dtype) -> None:
        buckets: dict[tuple[bool, int, int], list[AttentionSpan]] = defaultdict(list)
        for span in spans_of(tree):
            shares = span.fresh < len(span.path)
            buckets[shares, _size_class(span.fresh), _size_class(len(span.path))].append(span)
        self.buckets = [Bucket(spans, device, dtype) for _, spans in sorted(buckets.items(), key=lambda item: item[0])]
        order = np.concatenate([span.path[-span.fresh :] for bucket in self.buckets for span in bucket.spans])
        self._back = on_device(np.argsort(order), device)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))  # [rows, heads, dim]
        parts = [bucket.attend(query, key, value, scale) for bucket in self.buckets]
        return torch.cat(parts).index_select(0, self._back)


class Bucket:
    """Spans whose attentions are computed together.

    Spans that share nothing need no mask: their padding follows them, where causal attention does not look. The mask of
    the others is built once for all layers and heads.
    """

    def __init__(self, spans: list[AttentionSpan], device: torch.device, dtype: torch.dtype) -> None:
        self.spans = spans
        self.queries, self.keys = max(s.fresh for s in spans), max(len(s.path) for s in spans)
        query_rows = np.zeros((len(spans), self.queries), np.int64)
        key_rows = np.zeros((len(spans), self.keys), np.int64)
        for i, span in enumerate(spans):
            query_rows[i, : span.fresh] = span.path[-span.fresh :]
            key_rows[i, : len(span.path)] = span.path
        real = np.arange(self.queries)[None] < np.array([s.fresh for s in spans])[:, None]
        self._query_rows, self._key_rows, self._real = (
            on_device(array, device) for array in (query_rows, key_rows, np.flatnonzero(real))
        )
        shared = np.array([len(s.path) - s.fresh for s in spans])
        self._dtype = attends_in(device.type, dtype, self.keys)
        self._mask = _mask(shared, self.queries, self.keys, device, self._dtype) if shared.any() else None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [rows, heads, dim], key and value [rows, kv_heads, dim] → outputs of the spans' packed tokens, in their
        order."""
        out = scaled_dot_product_attention(
            self._padded(query, self._query_rows),
            self._padded(key, self._key_rows),
            self._padded(value, self._key_rows),
            attn_mask=self._mask,
            is_causal=self._mask is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(1, 2).flatten(0, 1).index_select(0, self._real).to(query.dtype)

    def _padded(self, tensor: Tensor, rows: Tensor) -> Tensor:
        """[rows, heads, dim] → [spans, heads, size, dim], in the precision of the attention."""
        return _rows(tensor, rows).to(self._dtype).transpose(1, 2)


def _mask(shared: Indices, queries: int, keys: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[spans, 1, queries, keys]: 0 where a query attends to a key, else -inf. Query q of a span that shares s packed
    tokens attends to keys 0 to s + q."""
    last = on_device(shared, device)[:, None] + torch.arange(queries, device=device)
    hidden = torch.arange(keys, device=device) > last[:, :, None]
    return torch.zeros(hidden.shape, device=device, dtype=dtype).masked_fill_(hidden, -torch.inf)[:, None]


def _rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """tensor[rows] for any shape of rows, with a backward pass that is several times faster on a CPU."""
    return tensor.index_select(0, rows.flatten()).view(*rows.shape, *tensor.shape[1:])


def _size_class(size: int) -> int:
    """Sizes within an eighth of each other, and all small ones, count as similar."""
    step = 1 << max(size.bit_length() - 4, 4)
    return -(-size // step) * step
