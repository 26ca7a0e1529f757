"""Triton kernels for the experts of an MoE layer. Imported only where Triton is installed.

A row is routed to `chosen` experts; a row and one of its experts are a pair, and pair row · chosen + n is the row with
its n-th expert. Pairs are sorted by expert without the host: each takes the next place in its expert's line of `order`,
and the programs of the products find their expert and its pairs from the lengths of the lines. The number of programs
depends only on the number of rows, so that a CUDA graph works for any routes; surplus programs end at once.

    logits → routed → pairs in lines → gate and up, gated → down → weighted and summed by `add_norm`

Values are rounded where the model's own code rounds them. A pair's result does not depend on its place in the line.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from roll.engine.paged.layer_kernels import power


@triton.jit
def _route(
    logits,
    weights,
    counts,
    order,
    routes,
    given,
    rows,
    routes_stride,
    EXPERTS: tl.constexpr,
    PAD: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHOSEN_PAD: tl.constexpr,
    NORMALISED: tl.constexpr,
    RECORDS: tl.constexpr,
    GIVEN: tl.constexpr,
):
    """One program per row: its most likely experts (or those given), their weights, and their places in the experts'
    lines of `order`."""
    row = tl.program_id(0)
    offs = tl.arange(0, PAD)
    inside = offs < EXPERTS
    wide = tl.load(logits + row * EXPERTS + offs, mask=inside, other=-float("inf")).to(tl.float32)
    wide = tl.exp(wide - tl.max(wide, 0))
    shares = wide / tl.sum(wide, 0)
    # If a row's logits are NaN, its shares are set to 0, so that it still gets the usual number of distinct experts.
    remaining = tl.where(inside, tl.where(shares == shares, shares, 0.0), -1.0)
    ranks = tl.arange(0, CHOSEN_PAD)
    chosen = tl.zeros((CHOSEN_PAD,), tl.int32)
    values = tl.zeros((CHOSEN_PAD,), tl.float32)
    for rank in range(CHOSEN):
        best = tl.load(given + row * CHOSEN + rank) if GIVEN else tl.argmax(remaining, 0).to(tl.int32)
        value = tl.sum(tl.where(offs == best, shares, 0.0), 0)
        chosen = tl.where(ranks == rank, best, chosen)
        values = tl.where(ranks == rank, value, values)
        remaining = tl.where(offs == best, -2.0, remaining)
    if NORMALISED:
        values = values / tl.sum(values, 0)
    stored = ranks < CHOSEN
    pairs = row * CHOSEN + ranks
    tl.store(weights + pairs, values.to(weights.dtype.element_ty), mask=stored)
    entry = tl.atomic_add(counts + chosen, 1, mask=stored)
    tl.store(order + chosen.to(tl.int64) * rows + entry, pairs, mask=stored)
    if RECORDS:
        tl.store(routes + row.to(tl.int64) * routes_stride + ranks, chosen, mask=stored)


@triton.jit
def _sort_pairs(choices, counts, order, rows, pairs, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    """Assigns places in the experts' lines to pairs whose experts are known."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = pair < pairs
    expert = tl.load(choices + pair, mask=valid, other=0).to(tl.int32)
    entry = tl.atomic_add(counts + expert, 1, mask=valid)
    tl.store(order + expert.to(tl.int64) * rows + entry, pair, mask=valid)


@triton.jit
def _product(
    states,
    weight,
    counts,
    order,
    out,
    rows,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    PAD: tl.constexpr,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per LINES pairs of one expert and COLUMNS output columns: out[pair] = weight[expert] @ states[pair //
    SHARED]. With GATED, weight holds the gate's matrix above the other one: silu(gate) · other."""
    tiles: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    block = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles

    offs = tl.arange(0, PAD)
    lengths = tl.load(counts + offs, mask=offs < EXPERTS, other=0)
    blocks = (lengths + LINES - 1) // LINES
    expert = tl.sum((tl.cumsum(blocks, 0) <= block).to(tl.int32), 0)
    if expert < EXPERTS:
        before = tl.sum(tl.where(offs < expert, blocks, 0), 0)
        length = tl.sum(tl.where(offs == expert, lengths, 0), 0)
        entries = (block - before) * LINES + tl.arange(0, LINES)
        real = entries < length
        wide_expert = expert.to(tl.int64)
        pairs = tl.load(order + wide_expert * rows + entries, mask=real, other=0).to(tl.int64)
        columns = tile * COLUMNS + tl.arange(0, COLUMNS)
        lines = columns % WIDTH  # wraps around instead of reading beyond the end
        spans = tl.arange(0, STEP)
        above: tl.constexpr = WIDTH * DEPTH
        height: tl.constexpr = 2 * WIDTH if GATED else WIDTH
        source = states + (pairs // SHARED)[:, None] * DEPTH + spans[None, :]
        matrix = weight + wide_expert * (height * DEPTH) + lines[None, :] * DEPTH + spans[:, None]
        total = tl.zeros((LINES, COLUMNS), tl.float32)
        other = tl.zeros((LINES, COLUMNS), tl.float32)
        for start in range(0, DEPTH, STEP):
            if DEPTH % STEP == 0:
                part = tl.load(source + start)
                piece = tl.load(matrix + start)
            else:
                part = tl.load(source + start, mask=(start + spans < DEPTH)[None, :], other=0.0)
                piece = tl.load(matrix + start, mask=(start + spans < DEPTH)[:, None], other=0.0)
            total = tl.dot(part, piece, total, input_precision=PRECISION)
            if GATED:
                if DEPTH % STEP == 0:
                    piece = tl.load(matrix + above + start)
                else:
                    piece = tl.load(matrix + above + start, mask=(start + spans < DEPTH)[:, None], other=0.0)
                other = tl.dot(part, piece, other, input_precision=PRECISION)
        dtype = out.dtype.element_ty
        if GATED:
            gate = total.to(dtype).to(tl.float32)
            opened = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)
            total = opened * other.to(dtype).to(tl.float32)
        stored = real[:, None] & (columns < WIDTH)[None, :]
        tl.store(out + pairs[:, None] * WIDTH + columns[None, :], total.to(dtype), mask=stored)


@dataclass(frozen=True)
class SortedPairs:
    """Pairs sorted by expert."""

    counts: Tensor
    """Number of pairs per expert. [experts]"""
    order: Tensor
    """The pairs of each expert; the first `counts` entries of a line are valid. [experts, rows]"""
    chosen: int
    """Experts per row."""

    @property
    def rows(self) -> int:
        return self.order.shape[1]


@dataclass(frozen=True)
class Tile:
    """The tile that a program of a product computes, with its launch parameters."""

    lines: int
    columns: int
    step: int
    warps: int
    stages: int


def route(
    logits: Tensor,
    chosen: int,
    normalised: bool,
    dtype: torch.dtype,
    counts: Tensor,
    routes: Tensor | None = None,
    given: Tensor | None = None,
) -> tuple[SortedPairs, Tensor]:
    """The experts of each row of logits [rows, experts] with the largest softmax, and their weights [rows, chosen].

    `counts` [experts] must hold zeros; the returned lines use its memory. `routes` [rows or more, chosen] receives the
    experts of each row. With `given` [rows, chosen], the rows are routed to these experts.
    """
    rows, experts = logits.shape
    weights = torch.empty(rows, chosen, dtype=dtype, device=logits.device)
    order = torch.empty(experts, rows, dtype=torch.int32, device=logits.device)
    launch: Any = _route[(rows,)]
    launch(
        logits,
        weights,
        counts,
        order,
        counts if routes is None else routes,
        counts if given is None else given,
        rows,
        0 if routes is None else routes.stride(0),
        EXPERTS=experts,
        PAD=power(experts),
        CHOSEN=chosen,
        CHOSEN_PAD=power(chosen),
        NORMALISED=normalised,
        RECORDS=routes is not None,
        GIVEN=given is not None,
        num_warps=1,
    )
    return SortedPairs(counts, order, chosen), weights


def sort_by_expert(choices: Tensor, experts: int) -> SortedPairs:
    """Sorts pairs of rows and already chosen experts, [rows, chosen], by expert."""
    rows, chosen = choices.shape
    counts = torch.zeros(experts, dtype=torch.int32, device=choices.device)
    order = torch.empty(experts, rows, dtype=torch.int32, device=choices.device)
    launch: Any = _sort_pairs[(triton.cdiv(rows * chosen, 128),)]
    launch(choices.contiguous(), counts, order, rows, rows * chosen, CHOSEN=chosen, BLOCK=128, num_warps=1)
    return SortedPairs(counts, order, chosen)


def experts(states: Tensor, lines: SortedPairs, gate_up: Tensor, down: Tensor) -> Tensor:
    """The outputs of all pairs: states [rows, hidden], widen [experts, 2 · inner, hidden], narrow [experts, hidden,
    inner] → [rows · chosen, hidden]."""
    inner = _multiply(states, lines, gate_up, shared=lines.chosen, gated=True)
    return _multiply(inner, lines, down, shared=1, gated=False)


def _multiply(
    states: Tensor, lines: SortedPairs, weight: Tensor, *, shared: int, gated: bool, tile: Tile | None = None
) -> Tensor:
    experts, height, depth = weight.shape
    width, pairs = height // 2 if gated else height, lines.rows * lines.chosen
    tile = tile or _fitted(tile_for(pairs / experts, states.dtype, gated), gated, states)
    out = states.new_empty(pairs, width)
    launch: Any = _product[(_blocks(pairs, experts, tile.lines) * triton.cdiv(width, tile.columns),)]
    launch(
        states,
        weight,
        lines.counts,
        lines.order,
        out,
        lines.rows,
        DEPTH=depth,
        WIDTH=width,
        EXPERTS=experts,
        PAD=power(experts),
        SHARED=shared,
        GATED=gated,
        LINES=tile.lines,
        COLUMNS=tile.columns,
        STEP=tile.step,
        PRECISION="ieee" if states.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def _blocks(pairs: int, experts: int, lines: int) -> int:
    """The most blocks of `lines` lines that the pairs can need, for any distribution over the experts."""
    return (pairs + min(pairs, experts) * (lines - 1)) // lines


def tile_for(mean: float, dtype: torch.dtype, gated: bool) -> Tile:
    """A tile for `mean` pairs per expert. Chosen from some hundred tiles as the fastest on an H200, or nearly so."""
    if dtype == torch.float32:
        return Tile(16, 32, 32, 4, 2)
    if mean <= 8:
        return Tile(16, 64 if gated else 128, 128, 4, 3)
    if mean <= (48 if gated else 96):
        return Tile(32, 128, 64 if gated else 128, 4, 3)
    if not gated:
        return Tile(64, 128, 64, 4, 4)
    return Tile(64 if mean <= 300 else 128, 128, 64, 8, 4)


def _fitted(tile: Tile, gated: bool, states: Tensor) -> Tile:
    """The tile with as many pipeline stages as the device's shared memory allows."""
    if not states.is_cuda:
        return tile
    stage = (tile.lines + tile.columns * (2 if gated else 1)) * tile.step * states.itemsize
    device: Any = torch.cuda.get_device_properties(states.device)
    most = device.shared_memory_per_block_optin // stage
    return replace(tile, stages=max(1, min(tile.stages, most)))
