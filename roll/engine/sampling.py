"""Drawing tokens: one uniform number a token, from (seed, position), through the inverse of the distribution.

Nothing here has state: the same logits, seed and position give the same token in any batch, in any process, now or after
a restart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from roll.config.errors import RunError
from roll.engine.request import SamplingParams

_BLOCK = 256


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position), by two rounds of a 64-bit mixing function (splitmix64)."""
    with np.errstate(over="ignore"):
        state = _mix(np.array(seeds, np.uint64)) + np.array(positions, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(
    logits: Tensor, rows: Sequence[int], samplings: Sequence[SamplingParams], positions: Sequence[int]
) -> tuple[list[int], list[float]]:
    """One token a request, drawn from its row of fp32 logits [rows, vocab], and its log-prob under
    softmax(logits / temperature).

    A temperature of 0 takes the likeliest token, with its log-prob at temperature 1. Truncation by top-k and top-p
    renormalises, so the log-prob is the truncated distribution's.
    """
    # Requests that share a row and how to draw from it share the distribution.
    keys = [
        (row, s.temperature, s.top_k, s.top_p) if s.temperature > 0 else (row, 1.0, 0, 1.0)
        for row, s in zip(rows, samplings, strict=True)
    ]
    distinct = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    which = torch.tensor([distinct[key] for key in keys], device=logits.device)
    picked = torch.tensor([key[0] for key in distinct], device=logits.device)
    temperatures = torch.tensor([key[1] for key in distinct], device=logits.device)
    every = list(range(len(logits)))
    scaled = logits if [key[0] for key in distinct] == every else logits[picked]
    if any(key[1] != 1.0 for key in distinct):
        scaled = scaled / temperatures[:, None]
    truncated = {i: key for key, i in distinct.items() if key[2] > 0 or key[3] < 1}
    if truncated:
        scaled = scaled.clone()
    for index, (_, _, top_k, top_p) in truncated.items():
        scaled[index] = truncate(scaled[index], top_k, top_p)
    highest = scaled.amax(dim=-1, keepdim=True)
    mass = (scaled - highest).exp_()
    blocks = _block_sums(mass)
    total = blocks[:, -1]
    if bool(torch.isnan(total).any()):
        raise RunError("the model's logits are not numbers: the weights are damaged, or the temperature is near 0")
    noise = torch.from_numpy(uniforms([s.seed for s in samplings], positions)).to(logits.device)
    tokens = _invert(mass, blocks, which, noise)
    greedy = torch.tensor([s.temperature == 0 for s in samplings], device=logits.device)
    if bool(greedy.any()):
        tokens = torch.where(greedy, scaled.argmax(dim=-1)[which], tokens)
    logprobs = (scaled[which, tokens] - highest[which, 0]).double() - total[which].log()
    return tokens.tolist(), logprobs.float().tolist()


def truncate(scaled: Tensor, top_k: int, top_p: float) -> Tensor:
    """Puts -inf wherever a token is not among the k likeliest, or outside the smallest set of mass at least p. [vocab]"""
    ordered, order = scaled.sort(descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k > 0:
        keep[top_k:] = False
    if top_p < 1:
        mass = ordered.masked_fill(~keep, -torch.inf).softmax(dim=-1)
        keep &= mass.cumsum(dim=-1) - mass < top_p
    return torch.full_like(scaled, -torch.inf).scatter(0, order[keep], ordered[keep])


def _block_sums(mass: Tensor) -> Tensor:
    """What is in each block of tokens and all before it, in fp64. [rows, vocab] → [rows, blocks]"""
    rows, vocab = mass.shape
    whole = vocab - vocab % _BLOCK
    sums = mass[:, :whole].view(rows, whole // _BLOCK, _BLOCK).sum(dim=-1)
    if whole < vocab:
        sums = torch.cat([sums, mass[:, whole:].sum(dim=-1, keepdim=True)], dim=1)
    return sums.double().cumsum(dim=-1)


def _invert(mass: Tensor, blocks: Tensor, which: Tensor, noise: Tensor) -> Tensor:
    """Where the cumulative mass of row `which[i]` passes `noise[i]` of the whole: first the block, then the token."""
    blocks = blocks[which]
    target = noise * blocks[:, -1]
    block = _first_above(blocks, target)
    before = torch.where(block > 0, blocks.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    tokens = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=mass.device)
    there = tokens < mass.shape[1]
    inside = torch.where(there, mass[which[:, None], tokens.clamp(max=mass.shape[1] - 1)], 0.0).double().cumsum(dim=-1)
    # Rounding may leave the target a hair above the block's own sum: the last token of positive mass is meant then.
    highest = torch.nextafter(inside[:, -1], torch.zeros_like(noise))
    return block * _BLOCK + _first_above(inside, torch.minimum(target - before, highest))


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    index = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return index.clamp(max=cumulative.shape[1] - 1)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
