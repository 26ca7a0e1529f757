"""The tensors of the paged KV cache, and attention over them.

Invariants: position p of a sequence is in its block p // BLOCK at offset p % BLOCK. In each layer, a pass writes the keys
and values of all its rows before it reads any, so rows of one pass may attend to each other.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from roll.engine.attention_params import AttentionParams, attention_params_of, widened
from roll.engine.paged.step_inputs import StepInputs
from roll.engine.routes import RouteShape
from roll.model.shape import ModelShape

BLOCK = 16
"""Positions per block."""
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""Before torch 2.13, `varlen_attn` supports grouped-query attention without an argument."""


class PagedKVCache:
    """Keys and values: [layers, blocks, kv_heads, BLOCK, dim] each. If routes are recorded, also routes: [blocks · BLOCK,
    width]."""

    def __init__(
        self,
        shape: ModelShape,
        blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        recorded: RouteShape | None = None,
    ) -> None:
        size = (shape.layers, blocks, shape.kv_heads, BLOCK, shape.head_dim)
        self.keys = torch.zeros(size, dtype=dtype, device=device)
        self.values = torch.zeros(size, dtype=dtype, device=device)
        self.routes: Tensor | None = None
        if recorded is not None:
            self.routes = torch.zeros(blocks * BLOCK, recorded.width, dtype=recorded.dtype, device=device)

    @property
    def blocks(self) -> int:
        return self.keys.shape[1]

    def copy_from(self, other: PagedKVCache) -> None:
        """Copies the contents of a smaller cache, block by block."""
        self.keys[:, : other.blocks] = other.keys
        self.values[:, : other.blocks] = other.values
        if self.routes is not None and other.routes is not None:
            self.routes[: len(other.routes)] = other.routes

    def read_routes(self, cache_positions: NDArray[np.int64]) -> PendingRoutes:
        """Starts an asynchronous read of the routes at these cache positions. Steps launched later may overwrite them:
        the copy comes before those steps on the stream."""
        assert self.routes is not None
        where = torch.from_numpy(cache_positions)
        if not self.routes.is_cuda:
            return PendingRoutes(self.routes[where], None)
        found = self.routes[where.pin_memory().to(self.routes.device, non_blocking=True)]
        rows = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        rows.copy_(found, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return PendingRoutes(rows, done)

    @staticmethod
    def bytes_per_block(shape: ModelShape, dtype: torch.dtype, recorded: RouteShape | None = None) -> int:
        routes = BLOCK * recorded.bytes_per_token if recorded is not None else 0
        return 2 * shape.layers * shape.kv_heads * BLOCK * shape.head_dim * dtype.itemsize + routes


@dataclass(frozen=True)
class PendingRoutes:
    """Routes that are being copied to the host."""

    rows: Tensor
    done: torch.cuda.Event | None

    @property
    def is_done(self) -> bool:
        return self.done is None or bool(self.done.query())  # type: ignore[no-untyped-call]

    def read(self) -> Tensor:
        """Waits for the copy."""
        if self.done is not None:
            self.done.synchronize()
        return self.rows


class PagedPlan:
    """What prefill and decode passes have in common. As an `AttentionPlan` it also works with a model's own code."""

    def __init__(self, cache: PagedKVCache, rows: StepInputs) -> None:
        self.cache = cache
        self.rows = rows

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        layer = module.layer_idx
        assert isinstance(layer, int)
        value_dim = value.shape[-1]
        query, key, value = (widened(tensor, self.cache.keys.shape[-1]) for tensor in (query, key, value))
        self._store(layer, key.transpose(0, 1), value.transpose(0, 1))
        heads, rows, dim = query.shape
        flat = query.transpose(0, 1).reshape(rows, heads * dim)
        return self.read(layer, flat, heads, attention_params_of(module, scale)).view(rows, heads, dim)[..., :value_dim]

    def store_routes(self, routes: Tensor) -> None:
        """Stores the rows' routes [rows, …] beside their keys, if routes are recorded."""
        cached = self.cache.routes
        if cached is not None:
            cached[self.rows.cache_positions.long()] = routes.flatten(1).to(cached.dtype)

    def read(self, layer: int, query: Tensor, heads: int, params: AttentionParams) -> Tensor:
        """Attention of every row over the positions up to its own. The row's queries are the first heads · dim columns of
        `query`. → [rows, heads · dim]"""
        raise NotImplementedError

    def _store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """key, value [rows, kv_heads, dim]"""
        if key.is_cuda:
            from roll.engine.paged import layer_kernels as kernels

            kernels.store_kv(key, value, self.rows, self.cache.keys[layer], self.cache.values[layer])
            return
        cache_positions = self.rows.cache_positions.long()
        self.cache.keys[layer][cache_positions // BLOCK, :, cache_positions % BLOCK] = key
        self.cache.values[layer][cache_positions // BLOCK, :, cache_positions % BLOCK] = value


class DecodeMetadata(PagedPlan):
    """Attention for rows computed one by one: one row, or a few, per sequence. On a GPU, the rows from `alone` on are
    computed in tiles: consecutive rows of one sequence read its keys once. On a CPU, all consecutive rows do."""

    def __init__(self, cache: PagedKVCache, rows: StepInputs, alone: int | None = None) -> None:
        super().__init__(cache, rows)
        self._alone = rows.count if alone is None else alone

    def read(self, layer: int, query: Tensor, heads: int, params: AttentionParams) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        dim = keys.shape[-1]
        if query.is_cuda:
            from roll.engine.paged import attention_kernels as kernels

            attended, alone = query.new_empty(self.rows.count, heads * dim), self._alone
            first, others = self.rows.part(0, alone), self.rows.part(alone, self.rows.count)
            how: Any = {"heads": heads, "window": params.window, "cap": params.cap}
            splits = _splits(alone * keys.shape[1])
            kernels.attend(attended[:alone], query[:alone], first, keys, values, params.scale, splits=splits, **how)
            if others.count:
                kernels.attend_tiles(attended[alone:], query[alone:], others, keys, values, params.scale, **how)
            return attended
        out = query.new_empty(self.rows.count, heads, dim)
        for run, count in _runs(self.rows.slots.tolist(), self.rows.positions.tolist()):
            blocks = self.rows.block_table[: (count - 1) // BLOCK + 1, run.start].long()
            key, value = (_positions(cache[blocks])[:count] for cache in (keys, values))
            out[run] = _attend(query[run, : heads * dim].reshape(-1, heads, dim), key, value, params)
        return out.view(self.rows.count, heads * dim)


class PrefillMetadata(PagedPlan):
    """Attention for prefill: many rows of few sequences. The rows of a sequence are consecutive; each attends to all
    positions of its sequence up to its own, gathered from the blocks."""

    def __init__(self, cache: PagedKVCache, rows: StepInputs, spans: list[tuple[int, int]], key_at: Tensor) -> None:
        """`spans`: number of rows and of keys per sequence. `key_at`: cache positions of all these keys, in order."""
        super().__init__(cache, rows)
        self._spans = spans
        self._blocks, self._offsets = key_at // BLOCK, key_at % BLOCK
        queries, keys = [rows for rows, _ in spans], [keys for _, keys in spans]
        self._query_ends, self._key_ends = (_ends(sizes, rows.data.device) for sizes in (queries, keys))
        self._most = (max(queries), max(keys))

    def read(self, layer: int, query: Tensor, heads: int, params: AttentionParams) -> Tensor:
        dim = self.cache.keys.shape[-1]
        queries = query[:, : heads * dim].reshape(-1, heads, dim)
        key = self.cache.keys[layer][self._blocks, :, self._offsets]
        value = self.cache.values[layer][self._blocks, :, self._offsets]
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and params.cap is None and dim % 8 == 0:
            back = -1 if params.window is None else params.window - 1
            out = varlen_attn(
                queries,
                key,
                value,
                self._query_ends,
                self._key_ends,
                *self._most,
                scale=params.scale,
                window_size=(back, 0),
                **_GROUPED,
            )
            assert isinstance(out, Tensor)
            return out.view(-1, heads * dim)
        parts: list[Tensor] = []
        row = key_start = 0
        for rows, keys in self._spans:
            span = slice(key_start, key_start + keys)
            parts.append(_attend(queries[row : row + rows], key[span], value[span], params))
            row, key_start = row + rows, key_start + keys
        return torch.cat(parts).view(-1, heads * dim)


def _splits(programs: int) -> int:
    """Number of splits of a row's positions that gives a GPU enough parallel work."""
    return 1 if programs >= 200 else 4 if programs >= 50 else 16


def _runs(slots: list[int], positions: list[int]) -> Iterator[tuple[slice, int]]:
    """Runs of rows with consecutive positions of one sequence, and the number of positions the last row of each run
    sees."""
    start = 0
    for row in range(1, len(slots) + 1):
        if row == len(slots) or (slots[row], positions[row]) != (slots[start], positions[start] + row - start):
            yield slice(start, row), positions[row - 1] + 1
            start = row


def _positions(blocks: Tensor) -> Tensor:
    """[blocks, kv_heads, BLOCK, dim] → [positions, kv_heads, dim]"""
    return blocks.transpose(1, 2).flatten(0, 1)


def _ends(sizes: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def _attend(query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
    """Attention of the last rows of one sequence over all its positions. query [rows, heads, dim], key [keys, kv_heads,
    dim]"""
    rows, keys = query.shape[0], key.shape[0]
    repeats = query.shape[1] // key.shape[1]
    queries = query.transpose(0, 1)
    key, value = (tensor.transpose(0, 1).repeat_interleave(repeats, 0) for tensor in (key, value))
    ends = torch.arange(keys - rows, keys, device=query.device)[:, None]
    at = torch.arange(keys, device=query.device)[None]
    seen = at <= ends
    if params.window is not None:
        seen &= at > ends - params.window
    if params.cap is None:
        out = scaled_dot_product_attention(queries[None], key[None], value[None], attn_mask=seen, scale=params.scale)[0]
        return out.transpose(0, 1)
    scores = queries @ key.transpose(1, 2) * params.scale
    scores = (torch.tanh(scores / params.cap) * params.cap).masked_fill(~seen, -torch.inf)
    return (scores.float().softmax(-1).to(value.dtype) @ value).transpose(0, 1)
