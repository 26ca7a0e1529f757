"""Triton kernels for attention over the paged KV cache. Imported only where Triton is installed."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from roll.engine.paged.layer_kernels import power
from roll.engine.paged.step_inputs import StepInputs

SPLIT_TILE = 64
"""Positions that an attention kernel reads per iteration."""


@triton.jit
def _attend(
    query,
    keys,
    values,
    positions,
    block_table,
    out,
    highest,
    total,
    scale,
    window,
    cap,
    query_stride,
    columns,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per row, key head and split: the query heads that share a key head, over a part of the row's positions.

    With one split the final result is stored. Otherwise the partial result is stored in fp32, with its maximum and its
    sum, for `_join`.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    length = tl.load(positions + row) + 1
    first = 0
    if WINDOWED:
        first = tl.maximum(0, length - window)
    begin = first // TILE * TILE
    share = tl.cdiv(tl.cdiv(length - begin, TILE), SPLITS) * TILE
    start = begin + split * share
    end = tl.minimum(start + share, length)

    members = tl.arange(0, GROUP_PAD)
    offs = tl.arange(0, PAD)
    stored = (members < group)[:, None] & (offs < DIM)[None, :]
    where = row.to(tl.int64) * query_stride + (head * group + members)[:, None] * DIM + offs[None, :]
    queries = tl.load(query + where, mask=stored, other=0.0)
    running_max = tl.full((GROUP_PAD,), -1e30, tl.float32)
    running_sum = tl.zeros((GROUP_PAD,), tl.float32)
    result = tl.zeros((GROUP_PAD, PAD), tl.float32)
    for tile in range(start, end, TILE):
        at = tile + tl.arange(0, TILE)
        seen = at < end
        block = tl.load(block_table + (at // BLOCK) * columns + row, mask=seen, other=0).to(tl.int64)
        base = (block * KV_HEADS + head) * (BLOCK * DIM) + (at % BLOCK) * DIM
        if WINDOWED:
            seen = seen & (at >= first)
        key = tl.load(keys + base[None, :] + offs[:, None], mask=seen[None, :] & (offs < DIM)[:, None], other=0.0)
        scores = tl.dot(queries, key, input_precision=PRECISION) * scale
        if CAPPED:
            scores = cap * (2 / (1 + tl.exp(-2 * scores / cap)) - 1)
        scores = tl.where(seen[None, :], scores, -1e30)
        higher = tl.maximum(running_max, tl.max(scores, 1))
        weights = tl.where(seen[None, :], tl.exp(scores - higher[:, None]), 0.0)
        shrink = tl.exp(running_max - higher)
        running_sum = running_sum * shrink + tl.sum(weights, 1)
        value = tl.load(values + base[:, None] + offs[None, :], mask=seen[:, None] & (offs < DIM)[None, :], other=0.0)
        result = result * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        running_max = higher
    if SPLITS == 1:
        done = result / running_sum[:, None]
        target = (row.to(tl.int64) * HEADS + head * group + members)[:, None] * DIM + offs[None, :]
        tl.store(out + target, done.to(out.dtype.element_ty), mask=stored)
    else:
        part = ((row.to(tl.int64) * HEADS + head * group + members) * SPLITS) + split
        tl.store(out + part[:, None] * DIM + offs[None, :], result, mask=stored)
        tl.store(highest + part, running_max, mask=members < group)
        tl.store(total + part, running_sum, mask=members < group)


@triton.jit
def _attend_tile(
    query,
    keys,
    values,
    positions,
    block_table,
    out,
    scale,
    window,
    cap,
    query_stride,
    columns,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    LINES: tl.constexpr,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per tile of rows and key head: consecutive rows of one sequence, followed by padding rows, read its
    keys once. LINES is at least ROWS times the query heads per key head."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    group: tl.constexpr = HEADS // KV_HEADS
    lines = tl.arange(0, LINES)
    real = lines < ROWS * group
    rows = tile * ROWS + lines // group
    lengths = tl.load(positions + rows, mask=real, other=0) + 1
    end = tl.max(lengths, 0)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(0, tl.min(tl.where(real, lengths, end), 0) - window) // TILE * TILE

    offs = tl.arange(0, PAD)
    stored = real[:, None] & (offs < DIM)[None, :]
    members = (head * group + lines % group)[:, None] * DIM + offs[None, :]
    queries = tl.load(query + rows.to(tl.int64)[:, None] * query_stride + members, mask=stored, other=0.0)
    running_max = tl.full((LINES,), -1e30, tl.float32)
    running_sum = tl.zeros((LINES,), tl.float32)
    result = tl.zeros((LINES, PAD), tl.float32)
    for start in range(begin, end, TILE):
        at = start + tl.arange(0, TILE)
        there = at < end
        block = tl.load(block_table + (at // BLOCK) * columns + tile * ROWS, mask=there, other=0).to(tl.int64)
        base = (block * KV_HEADS + head) * (BLOCK * DIM) + (at % BLOCK) * DIM
        seen = at[None, :] < lengths[:, None]
        if WINDOWED:
            seen = seen & (at[None, :] >= lengths[:, None] - window)
        key = tl.load(keys + base[None, :] + offs[:, None], mask=there[None, :] & (offs < DIM)[:, None], other=0.0)
        scores = tl.dot(queries, key, input_precision=PRECISION) * scale
        if CAPPED:
            scores = cap * (2 / (1 + tl.exp(-2 * scores / cap)) - 1)
        scores = tl.where(seen, scores, -1e30)
        higher = tl.maximum(running_max, tl.max(scores, 1))
        weights = tl.where(seen, tl.exp(scores - higher[:, None]), 0.0)
        shrink = tl.exp(running_max - higher)
        running_sum = running_sum * shrink + tl.sum(weights, 1)
        value = tl.load(values + base[:, None] + offs[None, :], mask=there[:, None] & (offs < DIM)[None, :], other=0.0)
        result = result * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        running_max = higher
    done = result / tl.maximum(running_sum, 1e-30)[:, None]
    tl.store(out + rows.to(tl.int64)[:, None] * (HEADS * DIM) + members, done.to(out.dtype.element_ty), mask=stored)


@triton.jit
def _join(parts, maxima, total, out, DIM: tl.constexpr, PAD: tl.constexpr, SPLITS: tl.constexpr):
    """One program per row and head: combines the splits of `_attend`."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, PAD)
    inside = offs < DIM
    splits = tl.arange(0, SPLITS)
    tops = tl.load(maxima + row * SPLITS + splits)
    rates = tl.exp(tops - tl.max(tops, 0))
    running_sum = tl.sum(rates * tl.load(total + row * SPLITS + splits), 0)
    where = (row * SPLITS + splits)[:, None] * DIM + offs[None, :]
    values = tl.load(parts + where, mask=inside[None, :], other=0.0)
    joined = tl.sum(values * rates[:, None], 0) / running_sum
    tl.store(out + row * DIM + offs, joined.to(out.dtype.element_ty), mask=inside)


def attend(
    out: Tensor,
    query: Tensor,
    rows: StepInputs,
    keys: Tensor,
    values: Tensor,
    scale: float,
    *,
    heads: int,
    splits: int,
    window: int | None = None,
    cap: float | None = None,
) -> None:
    """Attention of every row over its own positions in one layer's cache, into `out` [rows, heads · dim]. A row's queries
    are the first heads · dim columns of `query`, which may have more."""
    _, kv_heads, _, dim = keys.shape
    parts = highest = total = out
    if splits > 1:
        parts = query.new_empty(rows.count, heads, splits, dim, dtype=torch.float32)
        highest, total = query.new_empty(2, rows.count, heads, splits, dtype=torch.float32)
    launch: Any = _attend[(rows.count, kv_heads, splits)]
    launch(
        query,
        keys,
        values,
        rows.positions,
        rows.block_table,
        parts,
        highest,
        total,
        scale,
        window or 0,
        cap or 0.0,
        query.stride(0),
        rows.data.stride(0),
        GROUP_PAD=max(16, power(heads // kv_heads)),
        SPLITS=splits,
        **_constants(query, keys, heads, window, cap),
    )
    if splits > 1:
        join: Any = _join[(rows.count * heads,)]
        join(parts, highest, total, out, DIM=dim, PAD=power(dim), SPLITS=splits, num_warps=1)


def tile_rows(heads: int, kv_heads: int) -> int:
    """Rows per tile: enough that rows times query heads per key head fill a matrix product."""
    return min(16, 1 << max(0, (64 * kv_heads // heads).bit_length() - 1))


def attend_tiles(
    out: Tensor,
    query: Tensor,
    rows: StepInputs,
    keys: Tensor,
    values: Tensor,
    scale: float,
    *,
    heads: int,
    window: int | None = None,
    cap: float | None = None,
) -> None:
    """As `attend`, for rows in tiles: the rows of a tile are consecutive rows of one sequence, followed by padding
    rows."""
    kv_heads = keys.shape[1]
    tile = tile_rows(heads, kv_heads)
    launch: Any = _attend_tile[(rows.count // tile, kv_heads)]
    launch(
        query,
        keys,
        values,
        rows.positions,
        rows.block_table,
        out,
        scale,
        window or 0,
        cap or 0.0,
        query.stride(0),
        rows.data.stride(0),
        ROWS=tile,
        LINES=max(16, power(tile * heads // kv_heads)),
        **_constants(query, keys, heads, window, cap),
    )


def _constants(query: Tensor, keys: Tensor, heads: int, window: int | None, cap: float | None) -> dict[str, Any]:
    """The compile-time constants of both kernels."""
    _, kv_heads, block, dim = keys.shape
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "DIM": dim,
        "PAD": max(16, power(dim)),
        "BLOCK": block,
        "TILE": SPLIT_TILE,
        "WINDOWED": bool(window),
        "CAPPED": bool(cap),
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "num_warps": 4,
        "num_stages": 3 if dim <= 128 else 2,
    }
