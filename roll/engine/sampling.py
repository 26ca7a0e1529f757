"""Samples tokens: one uniform number per token, from (seed, position), mapped through the inverse of the distribution.

Sampling has no state: the same logits, seed and position give the same token in any batch and any process, also after a
restart.
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


def sample_tokens(
    logits: Tensor, rows: Sequence[int], samplings: Sequence[SamplingParams], positions: Sequence[int]
) -> tuple[list[int], list[float]]:
    """One token per request, sampled from its row of fp32 logits [rows, vocab], and its log-prob under softmax(logits /
    temperature).

    Temperature 0 takes the most likely token, with its log-prob at temperature 1. Truncation by top-k and top-p
    renormalises, so the log-prob is that of the truncated distribution.
    """
    # Requests with the same row and the same sampling parameters share the distribution.
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
    """Sets -inf for tokens that are not among the k most likely, or not in the smallest set with mass of at least p.
    [vocab]"""
    ordered, order = scaled.sort(descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k > 0:
        keep[top_k:] = False
    if top_p < 1:
        mass = ordered.masked_fill(~keep, -torch.inf).softmax(dim=-1)
        keep &= mass.cumsum(dim=-1) - mass < top_p
    return torch.full_like(scaled, -torch.inf).scatter(0, order[keep], ordered[keep])


def _block_sums(mass: Tensor) -> Tensor:
    """Cumulative mass up to the end of each block of tokens, in fp64. [rows, vocab] → [rows, blocks]"""
    rows, vocab = mass.shape
    whole = vocab - vocab % _BLOCK
    sums = mass[:, :whole].view(rows, whole // _BLOCK, _BLOCK).sum(dim=-1)
    if whole < vocab:
        sums = torch.cat([sums, mass[:, whole:].sum(dim=-1, keepdim=True)], dim=1)
    return sums.double().cumsum(dim=-1)


def _invert(mass: Tensor, blocks: Tensor, which: Tensor, noise: Tensor) -> Tensor:
    """The token at which the cumulative mass of row `which[i]` exceeds `noise[i]` of the total: first the block, then the
    token."""
    blocks = blocks[which]
    target = noise * blocks[:, -1]
    block = _first_above(blocks, target)
    before = torch.where(block > 0, blocks.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    tokens = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=mass.device)
    there = tokens < mass.shape[1]
    inside = torch.where(there, mass[which[:, None], tokens.clamp(max=mass.shape[1] - 1)], 0.0).double().cumsum(dim=-1)
    # Rounding may put the target slightly above the block's own sum: then take the last token of positive mass.
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
