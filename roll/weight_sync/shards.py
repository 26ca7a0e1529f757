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
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from roll.weight_sync.digest import finish, partial_sums
from roll.weight_sync.layout import ALIGNMENT, TensorSpan, TensorSpec

BLOCK_ELEMENTS = 1 << 22
"""Elements of a shard that are read at once: the memory that casting or merging them takes is bounded by it."""


@dataclass(frozen=True)
class Shard:
    """A rank's part of a tensor, which is seen as a matrix: some of its rows, and of each the same columns.

    Example: of a [4, 8, 2] tensor whose second dimension is cut in two, the second rank has the columns 8 to 15 of the
    rows of [4, 16].
    """

    width: int
    """Elements of a row of the whole tensor."""
    rows: slice
    columns: slice
    dtype: torch.dtype
    """That the tensor is served in."""
    read: Callable[[int, int], Tensor]
    """The part's elements from one number to another, counted in its own order, flat. In any precision: they are rounded
    to the served one where they are used, so that no more of them are cast than are needed."""

    @classmethod
    def of(
        cls, shape: tuple[int, ...], box: tuple[slice, ...], values: Tensor, dtype: torch.dtype | None = None
    ) -> Shard:
        """The shard with these values, contiguous, which are a box of the whole tensor, served in their own precision or
        another."""
        flat = values.detach().view(-1)
        return cls.reading(shape, box, dtype or values.dtype, lambda start, end: flat[start:end])

    @classmethod
    def reading(
        cls, shape: tuple[int, ...], box: tuple[slice, ...], dtype: torch.dtype, read: Callable[[int, int], Tensor]
    ) -> Shard:
        """The shard of a box of the whole tensor."""
        cut = [dim for dim, each in enumerate(box) if (each.start, each.stop) != (0, shape[dim])]
        last = cut[-1] if cut else 0
        inner = prod(shape[last + 1 :])
        columns = slice(box[last].start * inner, box[last].stop * inner) if box else slice(0, 1)
        first = cut[0] if len(cut) > 1 else last
        assert cut in ([], [last], [0, last]), f"a tensor of {shape} is cut in the dimensions {cut}"
        between = prod(shape[first + 1 : last])
        rows = slice(box[0].start * between, box[0].stop * between) if len(cut) > 1 else slice(0, prod(shape[:last]))
        return cls(prod(shape[last:]), rows, columns, dtype, read)

    @classmethod
    def empty(cls, dtype: torch.dtype) -> Shard:
        """The shard of a rank that contributes nothing."""
        return cls(1, slice(0, 0), slice(0, 0), dtype, lambda start, end: torch.empty(0, dtype=dtype))

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """The part as runs of elements that follow each other in the whole tensor: the byte where each starts there, and
        its elements in the served precision, with zeros for those between them that other ranks have. They are made one
        at a time."""
        size = self.columns.stop - self.columns.start
        for first, rows, start, count in self._blocks(0, self.rows.stop * self.width):
            found = self.read(start, start + rows * count).to(self.dtype)
            if rows > 1:
                padded = found.new_zeros(rows, self.width)
                padded[:, :size] = found.view(rows, size)
                found = padded.view(-1)[: (rows - 1) * self.width + size]
            yield first * self.dtype.itemsize, found

    def copy_span(self, span: TensorSpan, bucket: Tensor) -> None:
        """Copies what the rank has of the span's bytes to their place in the bucket."""
        itemsize = self.dtype.itemsize
        begin, end = span.start // itemsize, (span.start + span.size) // itemsize
        target = bucket[span.offset : span.offset + span.size].view(self.dtype)
        for first, rows, start, count in self._blocks(begin, end):
            found = self.read(start, start + rows * count).view(rows, count)
            strided = target.as_strided((rows, count), (self.width, 1), target.storage_offset() + first - begin)
            strided.copy_(found)

    def _blocks(self, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """What the part has of the whole tensor's elements [begin, end), in blocks of equal runs in neighbouring rows: a
        block's first element there, its rows, its first element in the part's own order, and the length of its runs. Of a
        row that begins or ends within the range there is a block of its own; long ones are cut."""
        lead, size = self.columns.start, self.columns.stop - self.columns.start
        if not size:
            return
        row, last = max(self.rows.start, begin // self.width), min(self.rows.stop, -(-end // self.width))
        most = max(1, BLOCK_ELEMENTS // self.width)
        while row < last:
            at = row * self.width + lead
            own = (row - self.rows.start) * size
            whole = min(last, (end - lead - size) // self.width + 1) - row  # rows whose columns are all before the end
            if at >= begin and whole > 0 and size <= BLOCK_ELEMENTS:
                rows = min(whole, most)
                yield at, rows, own, size
                row += rows
                continue
            first, stop = max(at, begin), min(at + size, end)
            for start in range(first, stop, BLOCK_ELEMENTS):
                yield start, 1, own + start - at, min(BLOCK_ELEMENTS, stop - start)
            row += 1


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
    def pack(self, bucket: Tensor | None, spans: Iterable[TensorSpan]) -> None:
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
