"""Publishing tensors that no process holds whole: each rank adds its own bytes to a bucket, and one rank has it.

What always holds: beside its shards a rank needs one bucket, whatever the size of a tensor; every byte of a bucket comes
from exactly one rank, so adding the ranks' buckets as integers puts them together exactly; a digest is the sum of what
the ranks compute from their own bytes. Every rank calls the same methods in the same order: they are collective.

Example: two ranks hold the rows 0-1 and 2-3 of a [4, 8] bf16 tensor (64 bytes). Of a bucket with its bytes 16 to 47 the
first rank writes 16 to 31 and the second 32 to 47; the rest of each rank's bucket is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from roll.transfer.digest import finish, partial_sum
from roll.transfer.layout import ALIGNMENT, Span, TensorSpec


@dataclass(frozen=True)
class Shard:
    """A rank's part of a tensor: the range that starts at `begin` of dimension `dim`, in the served precision."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    dim: int
    begin: int
    values: Tensor
    """Contiguous. Without elements where the rank has nothing of the tensor."""

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """The part as runs of bytes that follow each other in the whole tensor: where each starts there, and its bytes.
        Of a tensor that is cut in its first dimension there is one."""
        flat = self.values.detach().reshape(-1).view(torch.uint8)
        if not len(flat):
            return
        outer, inner = torch.Size(self.shape[: self.dim]).numel(), torch.Size(self.shape[self.dim + 1 :]).numel()
        row_bytes = self.shape[self.dim] * inner * self.values.itemsize
        first, size = self.begin * inner * self.values.itemsize, len(flat) // outer
        for row in range(outer):
            yield row * row_bytes + first, flat[row * size : (row + 1) * size]

    def copy_span(self, span: Span, bucket: Tensor) -> None:
        """Copies what the rank has of the span's bytes to their place in the bucket."""
        for start, piece in self.pieces():
            begin, end = max(start, span.start), min(start + len(piece), span.start + span.size)
            if begin < end:
                at = span.offset + begin - span.start
                bucket[at : at + end - begin].copy_(piece[begin - start : end - start])


class ShardedTensors:
    """A source of tensors for a `Sender`, on each rank of a process group.

    `shard_of` gives a rank's part by name and is asked again for every bucket, so that nothing is kept; of a tensor that
    another rank contributes (a replica's), it gives a shard without elements.
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

    def digests(self) -> dict[str, int]:
        """Every tensor's digest, on every rank."""
        sums = torch.stack([partial_sum(self._shard_of(spec.name).pieces(), self.device) for spec in self.specs])
        dist.all_reduce(sums, group=self._group)
        return {spec.name: finish(int(total), spec.nbytes) for spec, total in zip(self.specs, sums, strict=True)}

    def pack(self, bucket: Tensor | None, spans: Iterable[Span]) -> None:
        """Puts the spans' bytes together; the root copies them into its bucket, the others have none."""
        spans = tuple(spans)
        used = -(-(spans[-1].offset + spans[-1].size) // ALIGNMENT) * ALIGNMENT
        own = self._room(used)
        for span in spans:
            self._shard_of(span.tensor).copy_span(span, own)
        dist.reduce(own.view(torch.int32), group_dst=self._root, group=self._group)
        if bucket is not None:
            size = min(len(bucket), used)
            bucket[:size].copy_(own[:size])

    def free(self) -> None:
        """Frees the bucket's memory."""
        self._buffer = None

    def _room(self, size: int) -> Tensor:
        if self._buffer is None or len(self._buffer) < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._buffer[:size].zero_()
