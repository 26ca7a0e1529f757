"""A 64-bit digest of a tensor's bytes, the same on every device.

Invariants: equal bytes give equal digests, whatever the dtype, shape, strides or device; one changed byte always changes
the digest; extra memory is bounded, whatever the tensor's size (a tensor that is not contiguous is copied).

The bytes, padded with zeros, are signed 32-bit words w; the digest is the sum of w * weight(position) modulo 2^64, mixed
with the byte count. Weights are pseudo-random, 64 bits and odd. One changed word changes the sum by d * weight with
0 < |d| < 2^32, never a multiple of 2^64; several changed words cancel with a chance of 2^-32 at worst. (Words of 64 bits
would be faster and wrong: 2^63 times the sum of two odd weights is 0, so two changed signs could cancel.) It guards
against faults, not against forgery.

The sum is additive: each rank of a sharded trainer sums the bytes it holds, at their positions in the whole tensor
(`partial_sum`), and `finish` turns the sum over ranks into the digest of the whole tensor, which no rank has to gather. A
word that a shard boundary splits is the sum of its two halves, each padded with zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

BLOCK_WORDS = 1 << 20
_PIECE_WORDS = {"cpu": 1 << 17}
"""Words of a block that are multiplied at once, by device type (default: all), so that the products stay in the cache."""
_WORD = 4
_BLOCK_BYTES = _WORD * BLOCK_WORDS
_MASK = (1 << 64) - 1
_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def digest(tensor: Tensor) -> int:
    return digests({"": tensor})[""]


@torch.no_grad()
def digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Each tensor's digest, by name. Devices run asynchronously: the sums are read after the last one was launched. Each
    tensor is looked up once and not kept."""
    tables: dict[torch.device, tuple[Tensor, Tensor]] = {}
    sums: dict[str, tuple[Tensor, int]] = {}
    for name, tensor in tensors.items():
        words = min(-(-tensor.nbytes // _WORD), BLOCK_WORDS)
        if tensor.device not in tables or len(tables[tensor.device][0]) < words:
            tables[tensor.device] = _tables(words, tensor.device)
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        sums[name] = _weighted_sum(flat, 0, *tables[tensor.device]), tensor.nbytes
    return {name: finish(int(total), nbytes) for name, (total, nbytes) in sums.items()}


@torch.no_grad()
def partial_sum(pieces: Iterable[tuple[int, Tensor]], device: torch.device) -> Tensor:
    """The contribution of some bytes to a tensor's sum, a scalar on the device. `pieces`: pieces of the tensor, each with
    its byte offset in the whole tensor. Add the sums of all parts modulo 2^64 and pass the total to `finish`."""
    return partial_sums([(_BLOCK_BYTES, pieces)], device)[0]


@torch.no_grad()
def partial_sums(parts: Iterable[tuple[int, Iterable[tuple[int, Tensor]]]], device: torch.device) -> Tensor:
    """The `partial_sum` of several tensors, [tensors] on the device. `parts`: per tensor, the byte count of the whole
    tensor and its pieces, which are consumed one after another and not kept."""
    tables: tuple[Tensor, Tensor] | None = None
    sums = []
    for nbytes, pieces in parts:
        words = min(-(-nbytes // _WORD), BLOCK_WORDS)
        if tables is None or len(tables[0]) < words:
            tables = _tables(words, device)
        total = torch.zeros((), dtype=torch.int64, device=device)
        for start, piece in pieces:
            total += _weighted_sum(piece.detach().to(device).reshape(-1).view(torch.uint8), start, *tables)
        sums.append(total)
    return torch.stack(sums)


def _tables(words: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The weights of the first positions of any block, and a scratch tensor for products."""
    weights = _odd_weights(0, words, device)
    return weights, torch.empty_like(weights[: _PIECE_WORDS.get(device.type, words)])


def _weighted_sum(flat: Tensor, start: int, weights: Tensor, scratch: Tensor) -> Tensor:
    """The weighted sum of bytes that start at byte `start` of their tensor, a scalar on their device.
    weight(position) = weights[position in its block] * the block's weight."""
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    if not len(flat):
        return total
    first_block, last_block = start // _BLOCK_BYTES, (start + len(flat) - 1) // _BLOCK_BYTES
    blocks = _odd_weights(BLOCK_WORDS + first_block, last_block - first_block + 1, flat.device)
    for number, block in enumerate(blocks.unbind(), first_block):
        begin = max(start, number * _BLOCK_BYTES)
        piece = flat[begin - start : (number + 1) * _BLOCK_BYTES - start]
        words = _words(piece, begin % _WORD)
        odd = weights[begin % _BLOCK_BYTES // _WORD :]
        for chunk, chunk_weights in zip(torch.split(words, len(scratch)), torch.split(odd, len(scratch)), strict=False):
            total += torch.mul(chunk, chunk_weights[: len(chunk)], out=scratch[: len(chunk)]).sum() * block
    return total


def _words(piece: Tensor, lead: int = 0) -> Tensor:
    """The bytes as 32-bit words after `lead` zero bytes: a view if the words are complete and aligned, else a copy padded
    with zeros."""
    if not lead and len(piece) % _WORD == 0 and piece.storage_offset() % _WORD == 0:
        return piece.view(torch.int32)
    padded = torch.zeros(-(-(lead + len(piece)) // _WORD) * _WORD, dtype=torch.uint8, device=piece.device)
    padded[lead : lead + len(piece)].copy_(piece)
    return padded.view(torch.int32)


def _odd_weights(first: int, count: int, device: torch.device) -> Tensor:
    """Pseudo-random odd 64-bit numbers for the positions first, first + 1, …: the finaliser of SplitMix64."""
    x = torch.arange(first + 1, first + 1 + count, dtype=torch.int64, device=device).mul_(_signed(_GAMMA))
    x.bitwise_xor_(_shifted(x, 30)).mul_(_signed(_MIX_1))
    x.bitwise_xor_(_shifted(x, 27)).mul_(_signed(_MIX_2))
    return x.bitwise_xor_(_shifted(x, 31)).bitwise_or_(1)


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)  # >> extends the sign of an int64


def finish(total: int, nbytes: int) -> int:
    """The digest of a tensor of `nbytes` bytes from its sum: a bijection for each byte count, so different sums give
    different digests."""
    x = (total + nbytes * _GAMMA) & _MASK
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
