"""The slot KV cache: keys and values of the running sequences, one slot each, and attention over them.

Invariants: the running sequences occupy slots 0 … n-1 without holes, so decode reads the cache in place; the first
`length` positions of a slot are the keys and values of its sequence's tokens and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PretrainedConfig

from roll.data.routes import Routes
from roll.engine.attention_params import AttentionParams, attention_params_of, widened
from roll.engine.kv_sizing import CacheShape
from roll.engine.routes import RouteShape
from roll.model.shape import head_dim_of

_CALL = 128
"""Positions of one slot whose attention takes as long as the fixed cost of one attention call."""


class SlotCache:
    """Keys and values, one tensor per layer: [2, slots, kv_heads, positions, dim]. All layers have the same shape, which
    changes over time. If routes are recorded, also routes: [slots, positions, width]."""

    def __init__(
        self, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, recorded: RouteShape | None = None
    ) -> None:
        heads = config.num_attention_heads
        self.device = device
        self._kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        self.dim = head_dim_of(config)
        self._dtype = dtype
        self.shape = CacheShape()
        self.layers = [torch.empty(0)] * int(config.num_hidden_layers)
        self._recorded = recorded
        self.routes: Tensor | None = None

    @property
    def bytes_per_token(self) -> int:
        recorded = self._recorded.bytes_per_token if self._recorded is not None else 0
        return 2 * len(self.layers) * self._kv_heads * self.dim * self._dtype.itemsize + recorded

    def reshape(self, shape: CacheShape, sources: Sequence[tuple[int, int]] = ()) -> None:
        """Reallocates the cache with another number and length of slots. The first new slots receive the contents of old
        ones: `sources` has the old slot of each and the number of positions to copy."""
        for layer, old in enumerate(self.layers):
            new = self._layer(shape)
            for slot, (source, length) in enumerate(sources):
                new[:, slot, :, :length] = old[:, source, :, :length]
            self.layers[layer] = old = new  # the old layer is freed before the next one is allocated
        if self._recorded is not None:
            size = (shape.slots, shape.positions, self._recorded.width)
            routes = torch.zeros(size, dtype=self._recorded.dtype, device=self.device)
            for slot, (source, length) in enumerate(sources):
                assert self.routes is not None, "there are positions to take over"
                routes[slot, :length] = self.routes[source, :length]
            self.routes = routes
        self.shape = shape

    def routes_of(self, slot: int, start: int, end: int) -> Routes | None:
        """The routes recorded at these positions of a slot; None if none are recorded."""
        if self._recorded is None or self.routes is None:
            return None
        return self._recorded.host(self.routes[slot, start:end].cpu().clone())

    def _layer(self, shape: CacheShape) -> Tensor:
        """Zeros, not uninitialised memory: attention also reads positions beyond a slot's length, with weight 0."""
        size = (2, shape.slots, self._kv_heads, shape.positions, self.dim)
        return torch.zeros(size, dtype=self._dtype, device=self.device)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` positions of one slot into another."""
        for layer in self.layers:
            layer[:, target, :, :length] = layer[:, source, :, :length]
        if self.routes is not None:
            self.routes[target, :length] = self.routes[source, :length]

    def swap(self, a: int, b: int, a_length: int, b_length: int) -> None:
        """Exchanges the first positions of two slots."""
        for layer in self.layers:
            held = layer[:, a, :, :a_length].clone()
            layer[:, a, :, :b_length] = layer[:, b, :, :b_length]
            layer[:, b, :, :a_length] = held
        if self.routes is not None:
            recorded = self.routes[a, :a_length].clone()
            self.routes[a, :b_length] = self.routes[b, :b_length]
            self.routes[b, :a_length] = recorded

    def release(self) -> None:
        """Frees the memory. No request may be running."""
        self.shape = CacheShape()
        self.layers = [torch.empty(0)] * len(self.layers)
        self.routes = None


@dataclass(frozen=True)
class PrefillChunk:
    """Consecutive tokens of one sequence to append to its slot: positions start … start + rows - 1."""

    slot: int
    start: int
    rows: int


@dataclass(frozen=True)
class DecodeRows:
    """One token to append to a slot; `length` includes it."""

    slot: int
    length: int


@dataclass(frozen=True)
class _Run:
    """Consecutive slots that decode in one attention call; all are read up to the longest length."""

    rows: slice
    slots: slice
    lengths: list[int]

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def mask(self, window: int | None, device: torch.device) -> Tensor | None:
        """[slots, 1, 1, longest]; None if nothing is masked."""
        if min(self.lengths) == self.longest and (window is None or window >= self.longest):
            return None
        return _seen(torch.tensor(self.lengths, device=device), self.longest, window)[:, None, None]


class CachePlan:
    """Attention of one forward pass: prompt chunks, one after the other, then one row per decoding slot.

    With `exact`, every sequence is computed by itself over its exact length, so that its bits do not depend on the other
    sequences. Rows past the last are padding: they attend to nothing and stay zero.
    """

    def __init__(
        self, cache: SlotCache, chunks: list[PrefillChunk], decoding: list[DecodeRows], exact: bool = False
    ) -> None:
        self._cache = cache
        self._chunks = chunks
        self._decoding = decoding
        self._exact = exact
        self._first = sum(chunk.rows for chunk in chunks)
        self._masks: dict[int | None, tuple[list[Tensor | None], list[Tensor | None]]] = {}  # by window
        self._device = cache.device
        if decoding and not exact:
            self._slots = torch.tensor([each.slot for each in decoding], device=self._device)
            self._last = torch.tensor([each.length - 1 for each in decoding], device=self._device)
        self._runs = [self._run(rows) for rows in _slot_runs(decoding)] if not exact else []

    def _run(self, rows: range) -> _Run:
        """`rows` is counted from the first decode row."""
        first = self._decoding[rows.start].slot
        at = slice(self._first + rows.start, self._first + rows.stop)
        return _Run(at, slice(first, first + len(rows)), [self._decoding[row].length for row in rows])

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        layer = module.layer_idx
        assert isinstance(layer, int)
        params = attention_params_of(module, scale)
        of_chunks, of_runs = self._masks_of(params.window)
        value_dim = value.shape[-1]
        query, key, value = (widened(tensor, self._cache.dim) for tensor in (query, key, value))
        heads, rows, dim = query.shape
        output = query.new_zeros(rows, heads, dim)
        keys, values = self._cache.layers[layer]
        row = 0
        for chunk, mask in zip(self._chunks, of_chunks, strict=True):
            span = slice(row, row + chunk.rows)
            end = chunk.start + chunk.rows
            keys[chunk.slot, :, chunk.start : end] = key[:, span]
            values[chunk.slot, :, chunk.start : end] = value[:, span]
            attended = _alone(query[:, span], keys[chunk.slot, :, :end], values[chunk.slot, :, :end], mask, params)
            output[span] = attended.transpose(0, 1)
            row = span.stop
        if self._decoding and self._exact:
            for row, each in enumerate(self._decoding, self._first):
                keys[each.slot, :, each.length - 1] = key[:, row]
                values[each.slot, :, each.length - 1] = value[:, row]
                seen = slice(max(each.length - params.window, 0) if params.window else 0, each.length)
                one = _alone(query[:, row : row + 1], keys[each.slot, :, seen], values[each.slot, :, seen], None, params)
                output[row] = one[:, 0]
        elif self._decoding:
            span = slice(self._first, self._first + len(self._decoding))
            keys[self._slots, :, self._last] = key[:, span].transpose(0, 1)
            values[self._slots, :, self._last] = value[:, span].transpose(0, 1)
            for run, mask in zip(self._runs, of_runs, strict=True):
                seen_keys, seen_values = keys[run.slots, :, : run.longest], values[run.slots, :, : run.longest]
                output[run.rows] = _decoded(query[:, run.rows], seen_keys, seen_values, mask, params)
        return output[..., :value_dim]

    @property
    def records(self) -> bool:
        return self._cache.routes is not None

    def store_routes(self, routes: Tensor) -> None:
        """Stores the routes of the pass's rows, [rows, width], beside their keys."""
        assert self._cache.routes is not None
        row = 0
        for chunk in self._chunks:
            self._cache.routes[chunk.slot, chunk.start : chunk.start + chunk.rows] = routes[row : row + chunk.rows]
            row += chunk.rows
        for each, experts in zip(self._decoding, routes[row:], strict=False):  # further rows are padding
            self._cache.routes[each.slot, each.length - 1] = experts

    def _masks_of(self, window: int | None) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The masks of chunks and runs for layers with this sliding window."""
        if window not in self._masks:
            of_chunks = [_causal_mask(chunk, window, self._device) for chunk in self._chunks]
            self._masks[window] = of_chunks, [run.mask(window, self._device) for run in self._runs]
        return self._masks[window]


def _slot_runs(decoding: list[DecodeRows]) -> list[range]:
    """Groups the decode rows into runs of consecutive slots. A run is split where reading all its slots up to the longest
    would cost more than another attention call. Rows are in slot order."""
    runs: list[range] = []
    longest = 0
    for row, each in enumerate(decoding):
        if runs:
            joined = max(longest, each.length)
            wasted = (len(runs[-1]) + 1) * joined - len(runs[-1]) * longest - each.length
            if decoding[row - 1].slot + 1 == each.slot and wasted <= _CALL:
                runs[-1], longest = range(runs[-1].start, row + 1), joined
                continue
        runs.append(range(row, row + 1))
        longest = each.length
    return runs


def _causal_mask(chunk: PrefillChunk, window: int | None, device: torch.device) -> Tensor | None:
    """Which keys each row of the chunk attends to: itself and all before it. [rows, start + rows]"""
    end = chunk.start + chunk.rows
    if chunk.rows == 1 and (window is None or window >= end):
        return None
    return _seen(torch.arange(chunk.start + 1, end + 1, device=device), end, window)


def _seen(lengths: Tensor, longest: int, window: int | None) -> Tensor:
    """Which positions the last token of each length attends to. [lengths, longest]"""
    at = torch.arange(longest, device=lengths.device)[None]
    seen = at < lengths[:, None]
    return seen if window is None else seen & (at >= lengths[:, None] - window)


def _decoded(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, params: AttentionParams) -> Tensor:
    """One row per slot, in one call: query [heads, slots, dim], keys and values [slots, kv_heads, positions, dim]. Query
    heads that share a key head become the query rows of one attention, so nothing is copied."""
    heads, slots, dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.transpose(0, 1).reshape(slots, kv_heads, heads // kv_heads, dim)
    return _attended(grouped, keys, values, mask, params).reshape(slots, heads, dim)


def _alone(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, params: AttentionParams) -> Tensor:
    """One sequence. query [heads, rows, dim], key and value [kv_heads, positions, dim] → [heads, rows, dim]."""
    repeats = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(repeats, 0), value.repeat_interleave(repeats, 0)
    return _attended(query[None], key[None], value[None], mask, params)[0]


def _attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, params: AttentionParams) -> Tensor:
    if params.cap is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=params.scale)
    scores = torch.tanh(query @ key.transpose(-2, -1) * (params.scale / params.cap)) * params.cap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.float().softmax(dim=-1).to(value.dtype) @ value
