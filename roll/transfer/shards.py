"""Publishing tensors that no process holds whole: each rank adds its own bytes to a bucket, and one rank has it.

What always holds: beside its shards a rank needs one bucket (the root none but the one that it is given, if that is on
its device) and a block of one tensor, whatever the tensors' sizes; every
byte of a bucket comes from exactly one rank, so adding the ranks' buckets as integers puts them together exactly; a
digest is the sum of what the ranks compute from their own bytes. Every rank calls the same methods in the same order:
they are collective.

Example: two ranks hold the rows 0-1 and 2-3 of a [4, 8] bf16 tensor (64 bytes). Of a bucket with its bytes 16 to 47 the
first rank writes 16 to 31 and the second 32 to 47; the rest of each rank's bucket is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from roll.transfer.digest import finish, partial_sums
from roll.transfer.layout import ALIGNMENT, Span, TensorSpec

BLOCK_ELEMENTS = 1 << 22
"""Elements of a shard that are read at once: the memory that casting or merging them takes is bounded by it."""


@dataclass(frozen=True)
class Shard:
    """A rank's part of a tensor: the range [begin, end) of dimension `dim`."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    dim: int
    begin: int
    end: int
    dtype: torch.dtype
    """That the tensor is served in."""
    read: Callable[[int, int], Tensor]
    """The part's elements from one number to another, counted in its own order, flat. In any precision: they are rounded
    to the served one where they are used, so that no more of them are cast than are needed."""

    @classmethod
    def of(cls, shape: tuple[int, ...], dim: int, begin: int, values: Tensor, dtype: torch.dtype | None = None) -> Shard:
        """The shard with these values, contiguous, served in their own precision or another."""
        flat = values.detach().view(-1)
        extent = values.shape[dim] if values.ndim else 1
        return cls(shape, dim, begin, begin + extent, dtype or values.dtype, lambda start, end: flat[start:end])

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: torch.dtype) -> Shard:
        """The shard of a rank that contributes nothing."""
        return cls(shape, 0, 0, 0, dtype, lambda start, end: torch.empty(0, dtype=dtype))

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """The part as runs of elements that follow each other in the whole tensor: the byte where each starts there, and
        its elements in the served precision. They are made one at a time."""
        for first, count, own in self._runs(0, torch.Size(self.shape).numel()):
            yield first * self.dtype.itemsize, self.read(own, own + count).to(self.dtype)

    def copy_span(self, span: Span, bucket: Tensor) -> None:
        """Copies what the rank has of the span's bytes to their place in the bucket."""
        itemsize = self.dtype.itemsize
        begin, end = span.start // itemsize, (span.start + span.size) // itemsize
        for first, count, own in self._runs(begin, end):
            at = span.offset + first * itemsize - span.start
            bucket[at : at + count * itemsize].view(self.dtype).copy_(self.read(own, own + count))

    def _runs(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """What the part has of the whole tensor's elements [begin, end): for every run its first element there, its
        length, and its first element in the part's own order. Of a tensor that is cut in its first dimension there is
        one run, of another one for each index of the dimensions before; long ones are cut."""
        shape = self.shape or (1,)
        inner = torch.Size(shape[self.dim + 1 :]).numel()
        row, lead, size = shape[self.dim] * inner, self.begin * inner, (self.end - self.begin) * inner
        if not size or begin >= end:
            return
        for outer in range(begin // row, -(-end // row)):
            first, last = max(begin, outer * row + lead), min(end, outer * row + lead + size)
            for start in range(first, last, BLOCK_ELEMENTS):
                yield start, min(BLOCK_ELEMENTS, last - start), outer * size + start - outer * row - lead


class ShardedTensors:
    """A source of tensors for a `Sender`, on each rank of a process group.

    `shard_of` gives a rank's part by name and is asked again for every bucket, so that nothing is kept; of a tensor that
    another rank contributes (a replica's), it gives a shard without elements. It is asked for the same names in the same
    order on all ranks, so it may itself call the other ranks.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        shard_of: Callable[[str], Shard],
        group: dist.ProcessGroup,
        device: torch.device,
        root: int = 0,
    ) -> None:
        """`root` is the rank within the group that gets the buckets."""
        self.specs = tuple(specs)
        self.device = device
        self._shard_of = shard_of
        self._group, self._root = group, root
        self._buffer: Tensor | None = None

    @property
    def is_root(self) -> bool:
        return dist.get_rank(self._group) == self._root

    @torch.no_grad()
    def digests(self) -> dict[str, int]:
        """Every tensor's digest, on every rank."""
        parts = ((spec.nbytes, self._shard_of(spec.name).pieces()) for spec in self.specs)
        sums = partial_sums(parts, self.device)
        dist.all_reduce(sums, group=self._group)
        return {spec.name: finish(int(total), spec.nbytes) for spec, total in zip(self.specs, sums, strict=True)}

    @torch.no_grad()
    def pack(self, bucket: Tensor | None, spans: Iterable[Span]) -> None:
        """Puts the spans' bytes together in the root's bucket; the others have none."""
        spans = tuple(spans)
        used = -(-(spans[-1].offset + spans[-1].size) // ALIGNMENT) * ALIGNMENT
        own = bucket[:used] if bucket is not None and self._adds_in(bucket, used) else self._room(used)
        own.zero_()
        for span in spans:
            self._shard_of(span.tensor).copy_span(span, own)
        dist.reduce(own.view(torch.int32), group_dst=self._root, group=self._group)
        if bucket is not None and own.data_ptr() != bucket.data_ptr():
            size = min(len(bucket), used)
            bucket[:size].copy_(own[:size])

    def _adds_in(self, bucket: Tensor, used: int) -> bool:
        """Whether the ranks' bytes can be added in the bucket itself, so that the root needs no second one."""
        return bucket.device == self.device and len(bucket) >= used and bucket.data_ptr() % ALIGNMENT == 0

    def _room(self, size: int) -> Tensor:
        if self._buffer is None or len(self._buffer) < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._buffer[:size]
