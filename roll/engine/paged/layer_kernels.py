"""Triton kernels for a decoder's layers, except attention. Imported only where Triton is installed.

Values are rounded where the model's own code rounds them, so that the engine's log-probs are as close to the trainer's as
two sets of kernels can be. A row's inputs are a column of one int32 table (see `step_inputs.py`).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from roll.engine.paged.step_inputs import StepInputs


@triton.jit
def _embed(tokens, slots, last, weight, ids, out, HIDDEN: tl.constexpr, PAD: tl.constexpr):
    """Looks up a row's token (or the last token of its slot, if none is given) and its embedding."""
    row = tl.program_id(0)
    given = tl.load(tokens + row)
    token = tl.where(given < 0, tl.load(last + tl.load(slots + row)), given).to(tl.int64)
    offs = tl.arange(0, PAD)
    inside = offs < HIDDEN
    values = tl.load(weight + token * HIDDEN + offs, mask=inside)
    tl.store(out + row.to(tl.int64) * HIDDEN + offs, values, mask=inside)
    tl.store(ids + row, token)


@triton.jit
def _add_norm(
    stream,
    delta,
    shares,
    weight,
    out,
    eps,
    HIDDEN: tl.constexpr,
    PAD: tl.constexpr,
    ADDS: tl.constexpr,
    PARTS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """stream += delta; out = rms_norm(stream) · weight. If PARTS > 0, delta has PARTS lines per row, which are weighted
    with shares and summed."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, PAD)
    inside = offs < HIDDEN
    here = row * HIDDEN + offs
    values = tl.load(stream + here, mask=inside, other=0.0)
    dtype = values.dtype
    if ADDS:
        if PARTS:
            total = tl.zeros((PAD,), tl.float32)
            for part in range(PARTS):
                line = tl.load(delta + (row * PARTS + part) * HIDDEN + offs, mask=inside, other=0.0).to(tl.float32)
                weighed = line * tl.load(shares + row * PARTS + part).to(tl.float32)
                total += weighed.to(dtype).to(tl.float32) if ROUNDS else weighed
            added = total.to(dtype)
        else:
            added = tl.load(delta + here, mask=inside, other=0.0)
        values = (values.to(tl.float32) + added.to(tl.float32)).to(dtype)
        tl.store(stream + here, values, mask=inside)
    wide = values.to(tl.float32)
    rate = 1 / tl.sqrt(tl.sum(wide * wide, 0) / HIDDEN + eps)
    normed = (wide * rate).to(dtype).to(tl.float32)
    scaled = normed * tl.load(weight + offs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + here, scaled.to(dtype), mask=inside)


@triton.jit
def _normed(values, rate, query_norm, key_norm, is_query, offs, inside):
    """Multiplies half a head by the RMS norm's rate and weight."""
    of_query = tl.load(query_norm + offs, mask=inside, other=0.0)
    of_key = tl.load(key_norm + offs, mask=inside, other=0.0)
    scale = tl.where(is_query, of_query, of_key)
    return ((values * rate).to(scale.dtype).to(tl.float32) * scale.to(tl.float32)).to(scale.dtype).to(tl.float32)


@triton.jit
def _rotate_and_store(
    qkv,
    query_norm,
    key_norm,
    cosines,
    sines,
    positions,
    cache_positions,
    keys,
    values,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMS: tl.constexpr,
):
    """One program per row and head of `qkv` [rows, (heads + 2 kv_heads) · dim]: queries are rotated in place, keys are
    rotated and written to the cache, values are written to the cache."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half: tl.constexpr = DIM // 2
    offs = tl.arange(0, HALF_PAD)
    inside = offs < half
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * DIM + offs
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + half, mask=inside, other=0.0)
    dtype = first.dtype
    cache_position = tl.load(cache_positions + row).to(tl.int64)
    kv_head = (head - HEADS) % KV_HEADS
    target = ((cache_position // BLOCK) * KV_HEADS + kv_head) * BLOCK * DIM + (cache_position % BLOCK) * DIM + offs
    if head >= HEADS + KV_HEADS:
        tl.store(values + target, first, mask=inside)
        tl.store(values + target + half, second, mask=inside)
    else:
        a, b = first.to(tl.float32), second.to(tl.float32)
        if NORMS:
            rate = 1 / tl.sqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / DIM + eps)
            a = _normed(a, rate, query_norm, key_norm, head < HEADS, offs, inside)
            b = _normed(b, rate, query_norm + half, key_norm + half, head < HEADS, offs, inside)
        position = tl.load(positions + row).to(tl.int64)
        cosine = cosines + position * DIM + offs
        sine = sines + position * DIM + offs
        left = (a * tl.load(cosine, mask=inside).to(tl.float32)).to(dtype).to(tl.float32)
        left -= (b * tl.load(sine, mask=inside).to(tl.float32)).to(dtype).to(tl.float32)
        right = (b * tl.load(cosine + half, mask=inside).to(tl.float32)).to(dtype).to(tl.float32)
        right += (a * tl.load(sine + half, mask=inside).to(tl.float32)).to(dtype).to(tl.float32)
        if head >= HEADS:
            tl.store(keys + target, left.to(dtype), mask=inside)
            tl.store(keys + target + half, right.to(dtype), mask=inside)
        else:
            tl.store(source, left.to(dtype), mask=inside)
            tl.store(source + half, right.to(dtype), mask=inside)


@triton.jit
def _store_kv(
    key,
    value,
    cache_positions,
    keys,
    values,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes keys and values [rows, kv_heads, dim] to the cache."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    offs = tl.arange(0, PAD)
    inside = offs < DIM
    cache_position = tl.load(cache_positions + row).to(tl.int64)
    source = (row * KV_HEADS + head) * DIM + offs
    target = ((cache_position // BLOCK) * KV_HEADS + head) * BLOCK * DIM + (cache_position % BLOCK) * DIM + offs
    tl.store(keys + target, tl.load(key + source, mask=inside), mask=inside)
    tl.store(values + target, tl.load(value + source, mask=inside), mask=inside)


@triton.jit
def _gate(both, out, INNER: tl.constexpr, BLOCK: tl.constexpr):
    """silu(first half) · second half, each rounded where the model's own code rounds it."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < INNER
    gate = tl.load(both + row * 2 * INNER + offs, mask=inside, other=0.0)
    up = tl.load(both + row * 2 * INNER + INNER + offs, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    opened = (wide / (1 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * INNER + offs, (opened * up).to(gate.dtype), mask=inside)


def embed(rows: StepInputs, last: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The rows' tokens and their embeddings. [rows], [rows, hidden]"""
    hidden = weight.shape[1]
    ids = torch.empty(rows.count, dtype=torch.int64, device=weight.device)
    out = weight.new_empty(rows.count, hidden)
    launch: Any = _embed[(rows.count,)]
    launch(rows.tokens, rows.slots, last, weight, ids, out, HIDDEN=hidden, PAD=power(hidden), num_warps=_warps(hidden))
    return ids, out


def add_norm(stream: Tensor, delta: Tensor | None, weight: Tensor, eps: float, shares: Tensor | None = None) -> Tensor:
    """Adds delta to the residual stream and applies the norm. With `shares` [rows, parts], the sum over a row's parts in
    delta [rows · parts, hidden], each times its share, is added."""
    rows, hidden = stream.shape
    out = torch.empty_like(stream)
    launch: Any = _add_norm[(rows,)]
    launch(
        stream,
        stream if delta is None else delta,
        stream if shares is None else shares,
        weight,
        out,
        eps,
        HIDDEN=hidden,
        PAD=power(hidden),
        ADDS=delta is not None,
        PARTS=0 if shares is None else shares.shape[1],
        ROUNDS=shares is not None and shares.dtype == stream.dtype,
        num_warps=_warps(hidden),
    )
    return out


def rotate_and_store(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cosines: Tensor,
    sines: Tensor,
    rows: StepInputs,
    keys: Tensor,
    values: Tensor,
    heads: int,
) -> None:
    """keys, values: one layer's cache [blocks, kv_heads, block, dim]."""
    _, kv_heads, block, dim = keys.shape
    query_norm, key_norm = norms or (qkv, qkv)
    launch: Any = _rotate_and_store[(rows.count, heads + 2 * kv_heads)]
    launch(
        qkv,
        query_norm,
        key_norm,
        cosines,
        sines,
        rows.positions,
        rows.cache_positions,
        keys,
        values,
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        HALF_PAD=power(dim // 2),
        BLOCK=block,
        NORMS=norms is not None,
        num_warps=1,
    )


def store_kv(key: Tensor, value: Tensor, rows: StepInputs, keys: Tensor, values: Tensor) -> None:
    """Writes keys and values [rows, kv_heads, dim] to one layer's cache."""
    _, kv_heads, block, dim = keys.shape
    launch: Any = _store_kv[(rows.count, kv_heads)]
    given = (key.contiguous(), value.contiguous(), rows.cache_positions, keys, values)
    launch(*given, KV_HEADS=kv_heads, DIM=dim, PAD=power(dim), BLOCK=block, num_warps=1)


def gate(both: Tensor) -> Tensor:
    rows, inner = both.shape[0], both.shape[1] // 2
    out = both.new_empty(rows, inner)
    launch: Any = _gate[(rows, triton.cdiv(inner, 1024))]
    launch(both, out, INNER=inner, BLOCK=1024, num_warps=4)
    return out


def power(size: int) -> int:
    """The next power of two."""
    return int(triton.next_power_of_2(size))


def _warps(width: int) -> int:
    return 1 if width <= 512 else 4 if width <= 4096 else 8
