"""A 64-bit digest of a tensor's bytes, the same on every device.

What always holds: equal bytes give equal digests, whatever the dtype, shape, strides or device; one changed byte always
gives another digest; extra memory is bounded, whatever the tensor's size (a tensor that is not contiguous is copied).

The bytes, padded with zeros, are signed 32-bit words w; the digest is the sum of w * weight(position) modulo 2^64, mixed
with the byte count. Weights are pseudo-random, 64 bits and odd. One changed word changes the sum by d * weight with
0 < |d| < 2^32, never a multiple of 2^64; several changed words cancel with a chance of 2^-32 at worst. (Words of 64 bits
would be faster and wrong: 2^63 times the sum of two odd weights is 0, so two changed signs could cancel.) It guards
against faults, not against forgery.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

BLOCK_WORDS = 1 << 20
_PIECE_WORDS = {"cpu": 1 << 17}
"""Words of a block that are multiplied at once, where not all are: their products stay in the cache."""
_WORD = 4
_MASK = (1 << 64) - 1
_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def digest(tensor: Tensor) -> int:
    return digests({"": tensor})[""]


@torch.no_grad()
def digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Each tensor's digest, by name. Devices work ahead: the sums are read after the last was asked for. Each tensor is
    asked for once and not kept."""
    tables: dict[torch.device, tuple[Tensor, Tensor]] = {}
    sums: dict[str, tuple[Tensor, int]] = {}
    for name, tensor in tensors.items():
        words = min(-(-tensor.nbytes // _WORD), BLOCK_WORDS)
        if tensor.device not in tables or len(tables[tensor.device][0]) < words:
            weights = _odd_weights(0, words, tensor.device)
            tables[tensor.device] = weights, torch.empty_like(weights[: _PIECE_WORDS.get(tensor.device.type, words)])
        sums[name] = _weighted_sum(tensor, *tables[tensor.device]), tensor.nbytes
    return {name: _finish(int(total), nbytes) for name, (total, nbytes) in sums.items()}


def _weighted_sum(tensor: Tensor, weights: Tensor, scratch: Tensor) -> Tensor:
    """The sum, a scalar on the tensor's device. weight(position) = weights[position in its block] * the block's own."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    starts = range(0, len(flat), BLOCK_WORDS * _WORD)
    blocks = _odd_weights(BLOCK_WORDS, len(starts), flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start, block in zip(starts, blocks.unbind(), strict=True):
        words = _words(flat[start : start + BLOCK_WORDS * _WORD])
        for piece, odd in zip(torch.split(words, len(scratch)), torch.split(weights, len(scratch)), strict=False):
            total += torch.mul(piece, odd[: len(piece)], out=scratch[: len(piece)]).sum() * block
    return total


def _words(block: Tensor) -> Tensor:
    """The bytes as 32-bit words: a view where they are whole and aligned, else a copy padded with zeros."""
    if len(block) % _WORD == 0 and block.storage_offset() % _WORD == 0:
        return block.view(torch.int32)
    padded = torch.zeros(-(-len(block) // _WORD) * _WORD, dtype=torch.uint8, device=block.device)
    padded[: len(block)].copy_(block)
    return padded.view(torch.int32)


def _odd_weights(first: int, count: int, device: torch.device) -> Tensor:
    """Pseudo-random odd 64-bit numbers of the positions first, first + 1, …: the finaliser of SplitMix64."""
    x = torch.arange(first + 1, first + 1 + count, dtype=torch.int64, device=device).mul_(_signed(_GAMMA))
    x.bitwise_xor_(_shifted(x, 30)).mul_(_signed(_MIX_1))
    x.bitwise_xor_(_shifted(x, 27)).mul_(_signed(_MIX_2))
    return x.bitwise_xor_(_shifted(x, 31)).bitwise_or_(1)


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)  # >> repeats the sign of an int64


def _finish(total: int, nbytes: int) -> int:
    """A bijection of the sum for each byte count, so that what differs before differs after."""
    x = (total + nbytes * _GAMMA) & _MASK
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
