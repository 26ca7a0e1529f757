"""The layout of named tensors in buckets of bounded size: pure arithmetic, and the copies that it describes.

Invariants: every byte of every tensor is in exactly one span; spans of a bucket do not overlap and start at multiples of
16 bytes; a tensor that fits into a bucket is never split. So a bucket needs few and large copies, and no side needs more
memory than the buckets it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roll.config.errors import RunError

ALIGNMENT = 16


@dataclass(frozen=True)
class TensorSpec:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorSpec:
        return cls(name, tensor.dtype, tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def __str__(self) -> str:
        return f"{self.name!r} ({str(self.dtype).removeprefix('torch.')} {list(self.shape)})"


@dataclass(frozen=True)
class TensorSpan:
    """Bytes [start, start + size) of a tensor, stored at `offset` of the bucket."""

    tensor: str
    start: int
    offset: int
    size: int


@dataclass(frozen=True)
class BucketLayout:
    """Which spans are in which bucket. Example: tensors a (40 bytes), b (8) and c (100) in buckets of 64 bytes become
    [a at 0, b at 48], [c's first 64], [c's last 36]."""

    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int
    buckets: tuple[tuple[TensorSpan, ...], ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], bucket_bytes: int) -> BucketLayout:
        """The layout of the tensors in the order given."""
        return cls.of_specs(specs_of(tensors), bucket_bytes)

    @classmethod
    def of_specs(cls, specs: Sequence[TensorSpec], bucket_bytes: int) -> BucketLayout:
        """The layout of tensors by their specs; the tensors need not be in this process."""
        if bucket_bytes < ALIGNMENT:
            raise ValueError(f"a bucket of {bucket_bytes} bytes is too small: give at least {ALIGNMENT}")
        return cls(tuple(specs), bucket_bytes, _split(specs, bucket_bytes))

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors)

    @property
    def slot_bytes(self) -> int:
        """Used bytes of the fullest bucket: enough for any bucket, never more than `bucket_bytes`."""
        return max(map(used_bytes, self.buckets), default=0)

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises `RunError` with the first tensor that differs, unless `tensors` match the layout and are contiguous."""
        for spec in self.tensors:
            if spec.name not in tensors:
                raise RunError(
                    f"the sender's tensor {spec} is not among the receiver's: load the same model on both sides"
                )
            own = TensorSpec.of(spec.name, tensors[spec.name])
            if own != spec:
                raise RunError(
                    f"the receiver's tensor {own} is not the sender's {spec}: load the same model on both sides"
                )
            flat_bytes(spec.name, tensors[spec.name])
        known = {spec.name for spec in self.tensors}
        for name, tensor in tensors.items():
            if name not in known:
                spec = TensorSpec.of(name, tensor)
                raise RunError(
                    f"the receiver's tensor {spec} is not among the sender's: load the same model on both sides"
                )


def specs_of(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """The specs of tensors; raises `RunError` for a tensor that is not contiguous."""
    for name, tensor in tensors.items():
        flat_bytes(name, tensor)
    return tuple(TensorSpec.of(name, tensor) for name, tensor in tensors.items())


def used_bytes(spans: Sequence[TensorSpan]) -> int:
    """Used bytes of a bucket: the end of its last span."""
    return spans[-1].offset + spans[-1].size if spans else 0


def pack(bucket: Tensor, spans: Iterable[TensorSpan], tensors: Mapping[str, Tensor]) -> None:
    """Copies the spans' bytes from the tensors into the bucket, a flat uint8 tensor on any device."""
    for span in spans:
        bytes_of = flat_bytes(span.tensor, tensors[span.tensor])
        bucket[span.offset : span.offset + span.size].copy_(bytes_of[span.start : span.start + span.size])


def unpack(bucket: Tensor, spans: Iterable[TensorSpan], tensors: Mapping[str, Tensor]) -> None:
    """Copies the spans' bytes from the bucket into the tensors' own storage."""
    for span in spans:
        bytes_of = flat_bytes(span.tensor, tensors[span.tensor])
        bytes_of[span.start : span.start + span.size].copy_(bucket[span.offset : span.offset + span.size])


def flat_bytes(name: str, tensor: Tensor) -> Tensor:
    """A flat uint8 view of the tensor's storage; raises `RunError` for a tensor that is not contiguous."""
    if not tensor.is_contiguous():
        raise RunError(
            f"tensor {name!r} is not contiguous (shape {list(tensor.shape)}, strides {list(tensor.stride())}): "
            "its bytes cannot be moved in place; make it contiguous when the model is loaded"
        )
    return tensor.detach().view(-1).view(torch.uint8)


def _split(specs: Iterable[TensorSpec], bucket_bytes: int) -> tuple[tuple[TensorSpan, ...], ...]:
    capacity = bucket_bytes - bucket_bytes % ALIGNMENT
    buckets: list[list[TensorSpan]] = [[]]
    end = 0  # aligned end of the last span in the current bucket
    for spec in specs:
        start = 0
        while start < spec.nbytes:
            remaining = spec.nbytes - start
            if end == capacity or end + remaining > capacity >= remaining:
                buckets.append([])
                end = 0
            size = min(remaining, capacity - end)
            buckets[-1].append(TensorSpan(spec.name, start, end, size))
            start += size
            end += -(-size // ALIGNMENT) * ALIGNMENT
    return tuple(tuple(spans) for spans in buckets if spans)
