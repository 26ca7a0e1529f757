"""Keys and values of the running sequences, one slot each, and the attention over them.

What always holds: the running sequences occupy slots 0 … n-1 without holes, so decoding reads the cache in place; a
slot's first `length` positions are the keys and values of its sequence's tokens and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PretrainedConfig

_CALL = 128
"""Positions of one slot that take as long to attend to as a call of the attention takes before it begins."""


class SlotCache:
    """Keys and values: [layers, slots, kv_heads, positions, dim], grown when a longer sequence comes."""

    def __init__(self, shape: PretrainedConfig, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.slots = slots
        self.positions = 0
        heads = shape.num_attention_heads
        self._shape = (shape.num_hidden_layers, shape.num_key_value_heads or heads)
        self._dim = getattr(shape, "head_dim", None) or shape.hidden_size // heads
        self._dtype, self._device = dtype, device
        self.keys = self.values = torch.empty(0)

    @property
    def bytes_a_token(self) -> int:
        layers, kv_heads = self._shape
        return int(2 * layers * kv_heads * self._dim * self._dtype.itemsize)

    @staticmethod
    def rounded(positions: int) -> int:
        """Positions a slot is made with to hold at least so many."""
        return max(64, 1 << (positions - 1).bit_length())

    def reserve(self, positions: int) -> None:
        """Makes every slot at least `positions` long, keeping what is there."""
        if positions <= self.positions:
            return
        wanted = self.rounded(positions)
        layers, kv_heads = self._shape
        old = (self.keys, self.values)
        size = (layers, self.slots, kv_heads, wanted, self._dim)
        new = [torch.zeros(size, dtype=self._dtype, device=self._device) for _ in old]
        if self.positions:
            for source, target in zip(old, new, strict=True):
                target[:, :, :, : self.positions] = source
        self.keys, self.values = new
        self.positions = wanted

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` positions of one slot into another."""
        for tensor in (self.keys, self.values):
            tensor[:, target, :, :length] = tensor[:, source, :, :length]

    def swap(self, a: int, b: int, a_length: int, b_length: int) -> None:
        """Exchanges the first positions of two slots."""
        for tensor in (self.keys, self.values):
            held = tensor[:, a, :, :a_length].clone()
            tensor[:, a, :, :b_length] = tensor[:, b, :, :b_length]
            tensor[:, b, :, :a_length] = held

    def release(self) -> None:
        """Frees the memory; nothing may be running."""
        self.keys = self.values = torch.empty(0)
        self.positions = 0


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence, to be added to its slot: positions start … start + rows - 1."""

    slot: int
    start: int
    rows: int


@dataclass(frozen=True)
class Decoding:
    """One token of a sequence, to be added at the end of its slot; `length` counts it."""

    slot: int
    length: int


@dataclass(frozen=True)
class _Run:
    """Consecutive slots that decode together, as rows of the pass; all are read as far as the longest."""

    rows: slice
    slots: slice
    longest: int
    mask: Tensor | None
    """[slots, 1, 1, longest]; None where all have the same length."""


class CachePlan:
    """Attention of one forward pass: chunks of prompts, one after the other, then one row for each decoding slot.

    `exact` computes every sequence by itself over its exact length, so that its bits do not depend on its neighbours.
    Rows past the last are padding: they attend to nothing and stay zero.
    """

    def __init__(self, cache: SlotCache, chunks: list[Chunk], decoding: list[Decoding], exact: bool = False) -> None:
        self._cache = cache
        self._chunks = chunks
        self._decoding = decoding
        self._exact = exact
        self._first = sum(chunk.rows for chunk in chunks)
        device = cache.keys.device
        if decoding and not exact:
            self._slots = torch.tensor([each.slot for each in decoding], device=device)
            self._last = torch.tensor([each.length - 1 for each in decoding], device=device)
            self._runs = [self._run(some, device) for some in _together(decoding)]
        self._causal = [_causal_mask(chunk, device) for chunk in chunks]

    def _run(self, rows: range, device: torch.device) -> _Run:
        """`rows` counted from the first that decodes."""
        lengths = [self._decoding[row].length for row in rows]
        longest, first = max(lengths), self._decoding[rows.start].slot
        mask = None
        if min(lengths) < longest:
            visible = torch.arange(longest, device=device)[None] < torch.tensor(lengths, device=device)[:, None]
            mask = visible[:, None, None]
        at = slice(self._first + rows.start, self._first + rows.stop)
        return _Run(at, slice(first, first + len(rows)), longest, mask)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        layer = module.layer_idx
        assert isinstance(layer, int)
        heads, rows, dim = query.shape
        output = query.new_zeros(rows, heads, dim)
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        row = 0
        for chunk, mask in zip(self._chunks, self._causal, strict=True):
            span = slice(row, row + chunk.rows)
            end = chunk.start + chunk.rows
            keys[chunk.slot, :, chunk.start : end] = key[:, span]
            values[chunk.slot, :, chunk.start : end] = value[:, span]
            attended = _grouped(query[:, span], keys[chunk.slot, :, :end], values[chunk.slot, :, :end], mask, scale)
            output[span] = attended.transpose(0, 1)
            row = span.stop
        if self._decoding and self._exact:
            for row, each in enumerate(self._decoding, self._first):
                keys[each.slot, :, each.length - 1] = key[:, row]
                values[each.slot, :, each.length - 1] = value[:, row]
                seen = keys[each.slot, :, : each.length], values[each.slot, :, : each.length]
                output[row] = _grouped(query[:, row : row + 1], *seen, None, scale)[:, 0]
        elif self._decoding:
            span = slice(self._first, self._first + len(self._decoding))
            keys[self._slots, :, self._last] = key[:, span].transpose(0, 1)
            values[self._slots, :, self._last] = value[:, span].transpose(0, 1)
            for run in self._runs:
                seen = keys[run.slots, :, : run.longest], values[run.slots, :, : run.longest]
                output[run.rows] = _decoded(query[:, run.rows], *seen, run.mask, scale)
        return output


def _together(decoding: list[Decoding]) -> list[range]:
    """Cuts the decoding rows into runs of consecutive slots, and further where reading a run as far as its longest would
    cost more than another call of the attention. Rows are in the order of their slots."""
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


def _decoded(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """One row a slot, all at once: query [heads, slots, dim], keys and values [slots, kv_heads, positions, dim]. The
    heads that share keys are the query rows of one attention: nothing is copied."""
    heads, slots, dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.transpose(0, 1).reshape(slots, kv_heads, heads // kv_heads, dim)
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(slots, heads, dim)


def _causal_mask(chunk: Chunk, device: torch.device) -> Tensor | None:
    """Which keys each row of the chunk sees: all before it and itself. [rows, start + rows]"""
    if chunk.rows == 1:
        return None
    ends = torch.arange(chunk.start, chunk.start + chunk.rows, device=device)
    return torch.arange(chunk.start + chunk.rows, device=device)[None] <= ends[:, None]


def _grouped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """One sequence. query [heads, rows, dim], key and value [kv_heads, positions, dim] → [heads, rows, dim]."""
    repeats = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(repeats, 0), value.repeat_interleave(repeats, 0)
    return scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=mask, scale=scale)[0]
