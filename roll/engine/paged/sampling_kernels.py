"""The Triton kernels that sample a step's tokens. Imported only where Triton is installed."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from roll.engine.paged.layer_kernels import power
from roll.engine.paged.step_inputs import StepInputs

VOCAB_BLOCK = 4096


@triton.jit
def _block_statistics(
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
    """One program per row and block of the vocabulary: the block's maximum, its index, and Σ exp(z - maximum)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    offs = block * BLOCK + tl.arange(0, BLOCK)
    inside = offs < VOCAB
    temperature = tl.load(temperatures + row)
    values = tl.load(logits + row * VOCAB + offs, mask=inside, other=0.0).to(tl.float32)
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
    samples,
    tops,
    sums,
    likeliest,
    last,
    tokens,
    log_probs,
    cap,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """One program per row: a uniform number from (seed, length) is mapped through the inverse of the distribution, first
    to a block, then to a token in it. A row whose logits are NaN gets token -1."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    divisor = tl.where(temperature > 0, temperature, 1.0)
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
    offs = chosen * BLOCK + tl.arange(0, BLOCK)
    inside = offs < VOCAB
    values = tl.load(logits + row * VOCAB + offs, mask=inside, other=0.0).to(tl.float32)
    if CAPPED:
        values = cap * (2 / (1 + tl.exp(-2 * values / cap)) - 1)
    weights = tl.where(inside, tl.exp(values / divisor - top), 0.0)
    passed = before + tl.cumsum(weights, 0)
    index = tl.sum((passed <= target).to(tl.int32), 0)
    last_real = tl.max(tl.where(weights > 0, tl.arange(0, BLOCK), 0), 0)
    token = chosen * BLOCK + tl.minimum(index, last_real)  # rounding may put the target above the block's own sum
    greedy = tl.argmax(heights, 0)
    token = tl.where(temperature > 0, token, tl.load(likeliest + row * BLOCKS + greedy))
    logit = tl.load(logits + row * VOCAB + token).to(tl.float32)
    if CAPPED:
        logit = cap * (2 / (1 + tl.exp(-2 * logit / cap)) - 1)
    token = tl.where(mass == mass, token, -1)
    tl.store(tokens + row, token)
    tl.store(log_probs + row, logit / divisor - top - tl.log(mass))
    if tl.load(samples + row) > 0:
        tl.store(last + tl.load(slots + row), tl.maximum(token, 0))


def sample(logits: Tensor, rows: StepInputs, last: Tensor, out: Tensor, cap: float | None) -> None:
    """Samples a token for each of the first rows from logits [those rows, vocab]. `out` [2, those rows] receives the
    tokens and the bits of their log-probs; `last` receives the tokens of the slots whose rows sample."""
    count, vocab = logits.shape
    blocks = triton.cdiv(vocab, VOCAB_BLOCK)
    tops, sums = torch.empty(2, count, blocks, device=logits.device)
    likeliest = torch.empty(count, blocks, dtype=torch.int32, device=logits.device)
    shape = {"VOCAB": vocab, "BLOCKS": blocks, "BLOCK": VOCAB_BLOCK, "CAPPED": bool(cap), "num_warps": 8}
    statistics: Any = _block_statistics[(count, blocks)]
    statistics(logits, rows.temperatures, tops, sums, likeliest, cap or 0.0, **shape)
    choose: Any = _choose[(count,)]
    choose(
        logits,
        rows.temperatures,
        rows.seeds_low,
        rows.seeds_high,
        rows.positions,
        rows.slots,
        rows.samples,
        tops,
        sums,
        likeliest,
        last,
        out[0],
        out[1].view(torch.float32),
        cap or 0.0,
        BLOCKS_PAD=power(blocks),
        **shape,
    )
