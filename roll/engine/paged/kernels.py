"""The Triton kernels of a decoding step. Imported only where Triton is installed.

Values are rounded where the model's own code rounds them, so that an engine's log-probs are as near to the trainer's as
two kernels can be. A row's inputs stand in columns of one table of 32-bit numbers (see `rows.py`).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from roll.engine.paged.rows import Rows

VOCAB_BLOCK = 4096
SPLIT_TILE = 64
"""Positions an attention kernel reads at once."""


@triton.jit
def _embed(tokens, slots, last, weight, ids, out, HIDDEN: tl.constexpr, PAD: tl.constexpr):
    """The row's token, which is its slot's last one where none is given, and its embedding."""
    row = tl.program_id(0)
    given = tl.load(tokens + row)
    token = tl.where(given < 0, tl.load(last + tl.load(slots + row)), given).to(tl.int64)
    spots = tl.arange(0, PAD)
    inside = spots < HIDDEN
    values = tl.load(weight + token * HIDDEN + spots, mask=inside)
    tl.store(out + row.to(tl.int64) * HIDDEN + spots, values, mask=inside)
    tl.store(ids + row, token)


@triton.jit
def _add_norm(stream, delta, weight, out, eps, HIDDEN: tl.constexpr, PAD: tl.constexpr, ADDS: tl.constexpr):
    """stream += delta; out = rms_norm(stream) · weight."""
    row = tl.program_id(0).to(tl.int64)
    spots = tl.arange(0, PAD)
    inside = spots < HIDDEN
    here = row * HIDDEN + spots
    values = tl.load(stream + here, mask=inside, other=0.0)
    kind = values.dtype
    if ADDS:
        values = (values.to(tl.float32) + tl.load(delta + here, mask=inside, other=0.0).to(tl.float32)).to(kind)
        tl.store(stream + here, values, mask=inside)
    wide = values.to(tl.float32)
    rate = 1 / tl.sqrt(tl.sum(wide * wide, 0) / HIDDEN + eps)
    normed = (wide * rate).to(kind).to(tl.float32)
    scaled = normed * tl.load(weight + spots, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + here, scaled.to(kind), mask=inside)


@triton.jit
def _normed(values, rate, query_norm, key_norm, is_query, spots, inside):
    """A part of a head times its norm's rate and weight."""
    of_query = tl.load(query_norm + spots, mask=inside, other=0.0)
    of_key = tl.load(key_norm + spots, mask=inside, other=0.0)
    scale = tl.where(is_query, of_query, of_key)
    return ((values * rate).to(scale.dtype).to(tl.float32) * scale.to(tl.float32)).to(scale.dtype).to(tl.float32)


@triton.jit
def _rotate_and_keep(
    mixed,
    query_norm,
    key_norm,
    cosines,
    sines,
    positions,
    places,
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
    """One program a row and head of `mixed` [rows, (heads + 2 kv_heads) · dim]: queries are rotated where they are, keys
    on their way into the cache, values are put there."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half: tl.constexpr = DIM // 2
    spots = tl.arange(0, HALF_PAD)
    inside = spots < half
    source = mixed + (row * (HEADS + 2 * KV_HEADS) + head) * DIM + spots
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + half, mask=inside, other=0.0)
    kind = first.dtype
    place = tl.load(places + row).to(tl.int64)
    kv_head = (head - HEADS) % KV_HEADS
    kept = ((place // BLOCK) * KV_HEADS + kv_head) * BLOCK * DIM + (place % BLOCK) * DIM + spots
    if head >= HEADS + KV_HEADS:
        tl.store(values + kept, first, mask=inside)
        tl.store(values + kept + half, second, mask=inside)
    else:
        a, b = first.to(tl.float32), second.to(tl.float32)
        if NORMS:
            rate = 1 / tl.sqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / DIM + eps)
            a = _normed(a, rate, query_norm, key_norm, head < HEADS, spots, inside)
            b = _normed(b, rate, query_norm + half, key_norm + half, head < HEADS, spots, inside)
        position = tl.load(positions + row).to(tl.int64)
        cosine = cosines + position * DIM + spots
        sine = sines + position * DIM + spots
        left = (a * tl.load(cosine, mask=inside).to(tl.float32)).to(kind).to(tl.float32)
        left -= (b * tl.load(sine, mask=inside).to(tl.float32)).to(kind).to(tl.float32)
        right = (b * tl.load(cosine + half, mask=inside).to(tl.float32)).to(kind).to(tl.float32)
        right += (a * tl.load(sine + half, mask=inside).to(tl.float32)).to(kind).to(tl.float32)
        if head >= HEADS:
            tl.store(keys + kept, left.to(kind), mask=inside)
            tl.store(keys + kept + half, right.to(kind), mask=inside)
        else:
            tl.store(source, left.to(kind), mask=inside)
            tl.store(source + half, right.to(kind), mask=inside)


@triton.jit
def _keep(
    key, value, places, keys, values, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr
):
    """Puts [rows, kv_heads, dim] into the cache."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    spots = tl.arange(0, PAD)
    inside = spots < DIM
    place = tl.load(places + row).to(tl.int64)
    source = (row * KV_HEADS + head) * DIM + spots
    target = ((place // BLOCK) * KV_HEADS + head) * BLOCK * DIM + (place % BLOCK) * DIM + spots
    tl.store(keys + target, tl.load(key + source, mask=inside), mask=inside)
    tl.store(values + target, tl.load(value + source, mask=inside), mask=inside)


@triton.jit
def _attend(
    query,
    keys,
    values,
    positions,
    table,
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
    """One program a row, key head and split: the heads that share keys over a share of the row's positions.

    With one split the result is stored as it is; else it is stored in fp32, beside the maximum and the sum it was made
    with, for `_join`.
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
    spots = tl.arange(0, PAD)
    mine = (members < group)[:, None] & (spots < DIM)[None, :]
    where = row.to(tl.int64) * query_stride + (head * group + members)[:, None] * DIM + spots[None, :]
    asked = tl.load(query + where, mask=mine, other=0.0)
    most = tl.full((GROUP_PAD,), -1e30, tl.float32)
    mass = tl.zeros((GROUP_PAD,), tl.float32)
    result = tl.zeros((GROUP_PAD, PAD), tl.float32)
    for tile in range(start, end, TILE):
        at = tile + tl.arange(0, TILE)
        seen = at < end
        block = tl.load(table + (at // BLOCK) * columns + row, mask=seen, other=0).to(tl.int64)
        base = (block * KV_HEADS + head) * (BLOCK * DIM) + (at % BLOCK) * DIM
        if WINDOWED:
            seen = seen & (at >= first)
        key = tl.load(keys + base[None, :] + spots[:, None], mask=seen[None, :] & (spots < DIM)[:, None], other=0.0)
        scores = tl.dot(asked, key, input_precision=PRECISION) * scale
        if CAPPED:
            scores = cap * (2 / (1 + tl.exp(-2 * scores / cap)) - 1)
        scores = tl.where(seen[None, :], scores, -1e30)
        higher = tl.maximum(most, tl.max(scores, 1))
        weights = tl.where(seen[None, :], tl.exp(scores - higher[:, None]), 0.0)
        shrink = tl.exp(most - higher)
        mass = mass * shrink + tl.sum(weights, 1)
        value = tl.load(values + base[:, None] + spots[None, :], mask=seen[:, None] & (spots < DIM)[None, :], other=0.0)
        result = result * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        most = higher
    if SPLITS == 1:
        done = result / mass[:, None]
        target = (row.to(tl.int64) * HEADS + head * group + members)[:, None] * DIM + spots[None, :]
        tl.store(out + target, done.to(out.dtype.element_ty), mask=mine)
    else:
        part = ((row.to(tl.int64) * HEADS + head * group + members) * SPLITS) + split
        tl.store(out + part[:, None] * DIM + spots[None, :], result, mask=mine)
        tl.store(highest + part, most, mask=members < group)
        tl.store(total + part, mass, mask=members < group)


@triton.jit
def _join(parts, highest, total, out, DIM: tl.constexpr, PAD: tl.constexpr, SPLITS: tl.constexpr):
    """One program a row and head: the splits of `_attend` put together."""
    row = tl.program_id(0).to(tl.int64)
    spots = tl.arange(0, PAD)
    inside = spots < DIM
    splits = tl.arange(0, SPLITS)
    tops = tl.load(highest + row * SPLITS + splits)
    rates = tl.exp(tops - tl.max(tops, 0))
    mass = tl.sum(rates * tl.load(total + row * SPLITS + splits), 0)
    where = (row * SPLITS + splits)[:, None] * DIM + spots[None, :]
    values = tl.load(parts + where, mask=inside[None, :], other=0.0)
    joined = tl.sum(values * rates[:, None], 0) / mass
    tl.store(out + row * DIM + spots, joined.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate(both, out, INNER: tl.constexpr, BLOCK: tl.constexpr):
    """silu(first half) · second half, each rounded as the model rounds it."""
    row = tl.program_id(0).to(tl.int64)
    spots = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = spots < INNER
    gate = tl.load(both + row * 2 * INNER + spots, mask=inside, other=0.0)
    up = tl.load(both + row * 2 * INNER + INNER + spots, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    opened = (wide / (1 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * INNER + spots, (opened * up).to(gate.dtype), mask=inside)


@triton.jit
def _survey(
    logits,
    temperatures,
    tops,
    sums,
    likeliest,
    cap,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """One program a row and block of the vocabulary: its maximum, where that is, and Σ exp(z - maximum)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    spots = block * BLOCK + tl.arange(0, BLOCK)
    inside = spots < VOCAB
    temperature = tl.load(temperatures + row)
    values = tl.load(logits + row * VOCAB + spots, mask=inside, other=0.0).to(tl.float32)
    if CAPPED:
        values = cap * (2 / (1 + tl.exp(-2 * values / cap)) - 1)
    values = tl.where(inside, values / tl.where(temperature > 0, temperature, 1.0), float("-inf"))
    top = tl.max(values, 0)
    tl.store(tops + row * BLOCKS + block, top)
    tl.store(sums + row * BLOCKS + block, tl.sum(tl.exp(values - top), 0))
    tl.store(likeliest + row * BLOCKS + block, block * BLOCK + tl.argmax(values, 0))


@triton.jit
def _mix(state):
    state = state + 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def _choose(
    logits,
    temperatures,
    seeds_low,
    seeds_high,
    positions,
    slots,
    draws,
    tops,
    sums,
    likeliest,
    last,
    drawn,
    log_probs,
    cap,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """One program a row: a uniform number from (seed, length) goes through the inverse of the distribution, first to a
    block, then to a token in it. A row of values that are no numbers draws -1."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    heat = tl.where(temperature > 0, temperature, 1.0)
    blocks = tl.arange(0, BLOCKS_PAD)
    real = blocks < BLOCKS
    heights = tl.load(tops + row * BLOCKS + blocks, mask=real, other=float("-inf"))
    top = tl.max(heights, 0)
    masses = tl.where(real, tl.exp(heights - top) * tl.load(sums + row * BLOCKS + blocks, mask=real, other=0.0), 0.0)
    mass = tl.sum(masses, 0)

    low = tl.load(seeds_low + row).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(seeds_high + row).to(tl.uint32, bitcast=True).to(tl.uint64)
    length = (tl.load(positions + row) + 1).to(tl.uint64)
    noise = _mix(_mix((high << 32) | low) + length * 0x9E3779B97F4A7C15) >> 11
    target = tl.minimum((noise.to(tl.float64) * 1.1102230246251565e-16).to(tl.float32), 0.99999994) * mass

    reached = tl.cumsum(masses, 0)
    chosen = tl.minimum(tl.sum(((reached <= target) & real).to(tl.int32), 0), BLOCKS - 1)
    before = tl.sum(tl.where(blocks < chosen, masses, 0.0), 0)
    spots = chosen * BLOCK + tl.arange(0, BLOCK)
    inside = spots < VOCAB
    values = tl.load(logits + row * VOCAB + spots, mask=inside, other=0.0).to(tl.float32)
    if CAPPED:
        values = cap * (2 / (1 + tl.exp(-2 * values / cap)) - 1)
    weights = tl.where(inside, tl.exp(values / heat - top), 0.0)
    passed = before + tl.cumsum(weights, 0)
    spot = tl.sum((passed <= target).to(tl.int32), 0)
    last_real = tl.max(tl.where(weights > 0, tl.arange(0, BLOCK), 0), 0)
    token = chosen * BLOCK + tl.minimum(spot, last_real)  # rounding may leave the target beyond the block's own sum
    greedy = tl.argmax(heights, 0)
    token = tl.where(temperature > 0, token, tl.load(likeliest + row * BLOCKS + greedy))
    logit = tl.load(logits + row * VOCAB + token).to(tl.float32)
    if CAPPED:
        logit = cap * (2 / (1 + tl.exp(-2 * logit / cap)) - 1)
    token = tl.where(mass == mass, token, -1)
    tl.store(drawn + row, token)
    tl.store(log_probs + row, logit / heat - top - tl.log(mass))
    if tl.load(draws + row) > 0:
        tl.store(last + tl.load(slots + row), tl.maximum(token, 0))


def embed(rows: Rows, last: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The rows' tokens and their embeddings. [rows], [rows, hidden]"""
    hidden = weight.shape[1]
    ids = torch.empty(rows.count, dtype=torch.int64, device=weight.device)
    out = weight.new_empty(rows.count, hidden)
    launch: Any = _embed[(rows.count,)]
    launch(rows.tokens, rows.slots, last, weight, ids, out, HIDDEN=hidden, PAD=_power(hidden), num_warps=_warps(hidden))
    return ids, out


def add_norm(stream: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    rows, hidden = stream.shape
    out = torch.empty_like(stream)
    launch: Any = _add_norm[(rows,)]
    launch(
        stream,
        stream if delta is None else delta,
        weight,
        out,
        eps,
        HIDDEN=hidden,
        PAD=_power(hidden),
        ADDS=delta is not None,
        num_warps=_warps(hidden),
    )
    return out


def rotate_and_keep(
    mixed: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cosines: Tensor,
    sines: Tensor,
    rows: Rows,
    keys: Tensor,
    values: Tensor,
    heads: int,
) -> None:
    """keys, values: one layer's cache [blocks, kv_heads, block, dim]."""
    _, kv_heads, block, dim = keys.shape
    query_norm, key_norm = norms or (mixed, mixed)
    launch: Any = _rotate_and_keep[(rows.count, heads + 2 * kv_heads)]
    launch(
        mixed,
        query_norm,
        key_norm,
        cosines,
        sines,
        rows.positions,
        rows.places,
        keys,
        values,
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        HALF_PAD=_power(dim // 2),
        BLOCK=block,
        NORMS=norms is not None,
        num_warps=1,
    )


def keep(key: Tensor, value: Tensor, rows: Rows, keys: Tensor, values: Tensor) -> None:
    """Puts keys and values [rows, kv_heads, dim] into one layer's cache."""
    _, kv_heads, block, dim = keys.shape
    launch: Any = _keep[(rows.count, kv_heads)]
    given = (key.contiguous(), value.contiguous(), rows.places, keys, values)
    launch(*given, KV_HEADS=kv_heads, DIM=dim, PAD=_power(dim), BLOCK=block, num_warps=1)


def attend(
    query: Tensor,
    rows: Rows,
    keys: Tensor,
    values: Tensor,
    scale: float,
    *,
    heads: int,
    splits: int,
    window: int | None = None,
    cap: float | None = None,
) -> Tensor:
    """Every row over its own positions in one layer's cache. The queries of a row are the first of its line in `query`,
    which may be longer. → [rows, heads · dim]"""
    _, kv_heads, block, dim = keys.shape
    out = query.new_empty(rows.count, heads * dim)
    parts = out
    highest = total = out
    if splits > 1:
        parts = query.new_empty(rows.count, heads, splits, dim, dtype=torch.float32)
        highest, total = query.new_empty(2, rows.count, heads, splits, dtype=torch.float32)
    launch: Any = _attend[(rows.count, kv_heads, splits)]
    launch(
        query,
        keys,
        values,
        rows.positions,
        rows.table,
        parts,
        highest,
        total,
        scale,
        window or 0,
        cap or 0.0,
        query.stride(0),
        rows.count,
        HEADS=heads,
        KV_HEADS=kv_heads,
        GROUP_PAD=max(16, _power(heads // kv_heads)),
        DIM=dim,
        PAD=max(16, _power(dim)),
        BLOCK=block,
        TILE=SPLIT_TILE,
        SPLITS=splits,
        WINDOWED=bool(window),
        CAPPED=bool(cap),
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=3 if dim <= 128 else 2,
    )
    if splits > 1:
        join: Any = _join[(rows.count * heads,)]
        join(parts, highest, total, out, DIM=dim, PAD=_power(dim), SPLITS=splits, num_warps=1)
    return out


def gate(both: Tensor) -> Tensor:
    rows, inner = both.shape[0], both.shape[1] // 2
    out = both.new_empty(rows, inner)
    launch: Any = _gate[(rows, triton.cdiv(inner, 1024))]
    launch(both, out, INNER=inner, BLOCK=1024, num_warps=4)
    return out


def sample(logits: Tensor, rows: Rows, last: Tensor, out: Tensor, cap: float | None) -> None:
    """Draws a token for each of the first rows from logits [those rows, vocab]: `out` [2, those rows] gets the tokens and
    the bits of their log-probs, and `last` the tokens of the slots whose rows draw."""
    count, vocab = logits.shape
    blocks = triton.cdiv(vocab, VOCAB_BLOCK)
    tops, sums = torch.empty(2, count, blocks, device=logits.device)
    likeliest = torch.empty(count, blocks, dtype=torch.int32, device=logits.device)
    shape = {"VOCAB": vocab, "BLOCKS": blocks, "BLOCK": VOCAB_BLOCK, "CAPPED": bool(cap), "num_warps": 8}
    survey: Any = _survey[(count, blocks)]
    survey(logits, rows.temperatures, tops, sums, likeliest, cap or 0.0, **shape)
    choose: Any = _choose[(count,)]
    choose(
        logits,
        rows.temperatures,
        rows.seeds_low,
        rows.seeds_high,
        rows.positions,
        rows.slots,
        rows.draws,
        tops,
        sums,
        likeliest,
        last,
        out[0],
        out[1].view(torch.float32),
        cap or 0.0,
        BLOCKS_PAD=_power(blocks),
        **shape,
    )


def _power(size: int) -> int:
    return int(triton.next_power_of_2(size))


def _warps(width: int) -> int:
    return 1 if width <= 512 else 4 if width <= 4096 else 8
