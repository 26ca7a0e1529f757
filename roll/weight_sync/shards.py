"""Publishing sharded tensors: each rank adds its own bytes to a bucket, and the root rank gets the complete bucket.

Invariants: beside its shards a rank needs memory for one bucket (the root only for the bucket it is given, if that is on
its device) and for a block of one tensor, whatever the tensors' sizes; every byte of a bucket comes from exactly one
rank, so an integer sum-reduce over the ranks' buckets is exact; a digest is the sum of the values that the ranks compute
from their own bytes. The methods are collective: every rank calls them in the same order.

Example: two ranks hold the rows 0-1 and 2-3 of a [4, 8] bf16 tensor (64 bytes). For a bucket with its bytes 16 to 47 the
first rank writes 16 to 31 and the second 32 to 47; the rest of each rank's bucket is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from roll.weight_sync.digest import finish, partial_sums
from roll.weight_sync.layout import ALIGNMENT, TensorSpan, TensorSpec

BLOCK_ELEMENTS = 1 << 22
"""Elements of a shard that are read at once, which bounds the memory for casting or merging them."""


@dataclass(frozen=True)
class Shard:
    """A rank's part of a tensor, viewed as a matrix: some rows, and the same columns of each.

    Example: if the second dimension of a [4, 8, 2] tensor is sharded over two ranks, the second rank has the columns 8 to
    15 of all rows of [4, 16].
    """

    width: int
    """Elements per row of the whole tensor."""
    rows: slice
    columns: slice
    dtype: torch.dtype
    """The dtype that the engines serve the tensor in."""
    read: Callable[[int, int], Tensor]
    """`read(start, end)`: the shard's elements [start, end) in its own order, flat, in any dtype. They are cast to the
    served dtype when used, so that only needed elements are cast."""

    @classmethod
    def of(
        cls, shape: tuple[int, ...], box: tuple[slice, ...], values: Tensor, dtype: torch.dtype | None = None
    ) -> Shard:
        """The shard with these contiguous values, which are a box of the whole tensor; `dtype` is the served dtype, by
        default that of the values."""
        flat = values.detach().view(-1)
        return cls.reading(shape, box, dtype or values.dtype, lambda start, end: flat[start:end])

    @classmethod
    def reading(
        cls, shape: tuple[int, ...], box: tuple[slice, ...], dtype: torch.dtype, read: Callable[[int, int], Tensor]
    ) -> Shard:
        """The shard of a box of the whole tensor, with its elements from `read`."""
        sharded = [dim for dim, each in enumerate(box) if (each.start, each.stop) != (0, shape[dim])]
        last = sharded[-1] if sharded else 0
        inner = prod(shape[last + 1 :])
        columns = slice(box[last].start * inner, box[last].stop * inner) if box else slice(0, 1)
        first = sharded[0] if len(sharded) > 1 else last
        assert sharded in ([], [last], [0, last]), f"a tensor of {shape} is cut in the dimensions {sharded}"
        between = prod(shape[first + 1 : last])
        rows = slice(box[0].start * between, box[0].stop * between) if len(sharded) > 1 else slice(0, prod(shape[:last]))
        return cls(prod(shape[last:]), rows, columns, dtype, read)

    @classmethod
    def empty(cls, dtype: torch.dtype) -> Shard:
        """The shard of a rank that contributes nothing."""
        return cls(1, slice(0, 0), slice(0, 0), dtype, lambda start, end: torch.empty(0, dtype=dtype))

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """The shard as contiguous runs of the whole tensor: the byte offset of each run, and its elements in the served
        dtype, with zeros for elements of other ranks in between. They are created one at a time."""
        size = self.columns.stop - self.columns.start
        for first, rows, start, count in self._blocks(0, self.rows.stop * self.width):
            found = self.read(start, start + rows * count).to(self.dtype)
            if rows > 1:
                padded = found.new_zeros(rows, self.width)
                padded[:, :size] = found.view(rows, size)
                found = padded.view(-1)[: (rows - 1) * self.width + size]
            yield first * self.dtype.itemsize, found

    def copy_span(self, span: TensorSpan, bucket: Tensor) -> None:
        """Copies this rank's part of the span's bytes to their offset in the bucket."""
        itemsize = self.dtype.itemsize
        begin, end = span.start // itemsize, (span.start + span.size) // itemsize
        target = bucket[span.offset : span.offset + span.size].view(self.dtype)
        for first, rows, start, count in self._blocks(begin, end):
            found = self.read(start, start + rows * count).view(rows, count)
            strided = target.as_strided((rows, count), (self.width, 1), target.storage_offset() + first - begin)
            strided.copy_(found)

    def _blocks(self, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """The shard's part of the whole tensor's elements [begin, end), in blocks of equal runs in adjacent rows. Per
        block: its first element in the whole tensor, its rows, its first element in the shard's own order, and the length
        of its runs. A row that the range covers only partly is a block of its own; long rows are split."""
        lead, size = self.columns.start, self.columns.stop - self.columns.start
        if not size:
            return
        row, last = max(self.rows.start, begin // self.width), min(self.rows.stop, -(-end // self.width))
        most = max(1, BLOCK_ELEMENTS // self.width)
        while row < last:
            at = row * self.width + lead
            own = (row - self.rows.start) * size
            complete_rows = min(last, (end - lead - size) // self.width + 1) - row  # rows with all columns before `end`
            if at >= begin and complete_rows > 0 and size <= BLOCK_ELEMENTS:
                rows = min(complete_rows, most)
                yield at, rows, own, size
                row += rows
                continue
            first, stop = max(at, begin), min(at + size, end)
            for start in range(first, stop, BLOCK_ELEMENTS):
                yield start, 1, own + start - at, min(BLOCK_ELEMENTS, stop - start)
            row += 1


class ShardedTensors:
    """A `TensorSource` for a `Sender`, on each rank of a process group.

    `shard_of` returns a rank's shard by name. It is called again for every bucket, so that nothing is kept; for a tensor
    that another rank contributes (a replica), it returns an empty shard. It is called with the same names in the same
    order on all ranks, so it may itself use collectives.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        shard_of: Callable[[str], Shard],
        group: dist.ProcessGroup,
        device: torch.device,
        root: int = 0,
    ) -> None:
        """`root` is the rank within the group that receives the complete buckets."""
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
    def pack(self, bucket: Tensor | None, spans: Iterable[TensorSpan]) -> None:
        """Reduces the spans' bytes of all ranks into the root's bucket; the other ranks pass None."""
        spans = tuple(spans)
        used = -(-(spans[-1].offset + spans[-1].size) // ALIGNMENT) * ALIGNMENT
        own = bucket[:used] if bucket is not None and self._reduces_in(bucket, used) else self._scratch(used)
        own.zero_()
        for span in spans:
            self._shard_of(span.tensor).copy_span(span, own)
        dist.reduce(own.view(torch.int32), group_dst=self._root, group=self._group)
        if bucket is not None and own.data_ptr() != bucket.data_ptr():
            size = min(len(bucket), used)
            bucket[:size].copy_(own[:size])

    def _reduces_in(self, bucket: Tensor, used: int) -> bool:
        """Whether the reduce can run in the bucket itself, so that the root needs no second one."""
        return bucket.device == self.device and len(bucket) >= used and bucket.data_ptr() % ALIGNMENT == 0

    def _scratch(self, size: int) -> Tensor:
        if self._buffer is None or len(self._buffer) < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._buffer[:size]
