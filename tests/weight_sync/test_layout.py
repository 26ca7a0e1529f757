"""Layouts: every byte lies in one span, within the bucket's size, and comes back where it was."""

from __future__ import annotations

import pickle
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from roll.config.errors import RunError
from roll.weight_sync.layout import ALIGNMENT, BucketLayout, TensorSpan, TensorSpec, pack, unpack, used_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
SHAPES = st.lists(st.integers(0, 12), max_size=3).map(tuple)


@st.composite
def named(draw: st.DrawFn) -> dict[str, Tensor]:
    specs = draw(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    return {f"t{i}": _random(shape, dtype, generator) for i, (shape, dtype) in enumerate(specs)}


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    top = 2 if dtype is torch.bool else 256
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, top, (count,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@settings(deadline=None)
@given(named(), st.integers(ALIGNMENT, 2000))
def test_every_byte_lies_in_exactly_one_span(tensors: dict[str, Tensor], bucket_bytes: int) -> None:
    layout = BucketLayout.of(tensors, bucket_bytes)
    pieces: dict[str, list[TensorSpan]] = defaultdict(list)
    for spans in layout.buckets:
        end = 0
        assert spans
        for span in spans:
            assert span.size > 0
            assert span.offset % ALIGNMENT == 0
            assert span.offset >= end
            end = span.offset + span.size
            pieces[span.tensor].append(span)
        assert used_bytes(spans) == end <= layout.slot_bytes <= bucket_bytes
    room = bucket_bytes // ALIGNMENT * ALIGNMENT
    for spec in layout.tensors:
        position = 0
        for span in pieces.get(spec.name, []):
            assert span.start == position
            position += span.size
        assert position == spec.nbytes
        if 0 < spec.nbytes <= room:
            assert len(pieces[spec.name]) == 1
    assert list(pieces) == [spec.name for spec in layout.tensors if spec.nbytes]
    assert layout.nbytes == sum(tensor.nbytes for tensor in tensors.values())


@settings(deadline=None)
@given(named(), st.integers(ALIGNMENT, 2000))
def test_what_is_packed_is_unpacked(tensors: dict[str, Tensor], bucket_bytes: int) -> None:
    layout = pickle.loads(pickle.dumps(BucketLayout.of(tensors, bucket_bytes)))
    assert layout == BucketLayout.of(tensors, bucket_bytes)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    layout.check(loaded)
    bucket = torch.zeros(layout.slot_bytes, dtype=torch.uint8)
    for spans in layout.buckets:
        pack(bucket, spans, tensors)
        unpack(bucket, spans, loaded)
    for name, tensor in tensors.items():
        assert _bytes(loaded[name]) == _bytes(tensor)


def test_the_example_of_the_docstring() -> None:
    tensors = {n: torch.zeros(size, dtype=torch.uint8) for n, size in (("a", 40), ("b", 8), ("c", 100))}
    assert BucketLayout.of(tensors, 64).buckets == (
        (TensorSpan("a", 0, 0, 40), TensorSpan("b", 0, 48, 8)),
        (TensorSpan("c", 0, 0, 64),),
        (TensorSpan("c", 64, 0, 36),),
    )


def test_a_large_tensor_fills_what_the_bucket_has_left_and_shares_its_last() -> None:
    tensors = {n: torch.zeros(size, dtype=torch.uint8) for n, size in (("a", 16), ("b", 100), ("c", 20))}
    assert BucketLayout.of(tensors, 64).buckets == (
        (TensorSpan("a", 0, 0, 16), TensorSpan("b", 0, 16, 48)),
        (TensorSpan("b", 48, 0, 52),),
        (TensorSpan("c", 0, 0, 20),),
    )


def test_parameters_are_written_in_place() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    storage = parameter.data_ptr()
    layout = BucketLayout.of({"p": parameter}, 64)
    unpack(torch.ones(4).view(torch.uint8), layout.buckets[0], {"p": parameter})
    assert parameter.tolist() == [1, 1, 1, 1]
    assert parameter.data_ptr() == storage
    assert parameter.requires_grad


def test_what_is_not_contiguous_is_refused_by_name() -> None:
    tensors = {"fine": torch.zeros(2, 3), "turned": torch.zeros(2, 3).T}
    with pytest.raises(RunError, match=r"'turned' is not contiguous \(shape \[3, 2\], strides \[1, 3\]\)"):
        BucketLayout.of(tensors, 64)
    layout = BucketLayout.of({"turned": torch.zeros(3, 2)}, 64)
    with pytest.raises(RunError, match="'turned' is not contiguous"):
        layout.check({"turned": torch.zeros(2, 3).T})


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"a": torch.zeros(2)}, r"sender's tensor 'b' \(bfloat16 \[3\]\) is not among the receiver's"),
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, r"'b' \(float32 \[3\]\) is not the sender's 'b' \(bfloat16 \[3\]\)"),
        ({"a": torch.zeros(1, 2), "b": torch.zeros(4)}, r"'a' \(float32 \[1, 2\]\) is not the sender's 'a'"),
        (
            {"a": torch.zeros(2), "b": torch.zeros(3).bfloat16(), "c": torch.zeros(1)},
            r"receiver's tensor 'c' .* is not among the sender's",
        ),
    ],
)
def test_other_tensors_are_refused_by_the_first_that_differs(own: dict[str, Tensor], message: str) -> None:
    layout = BucketLayout.of({"a": torch.zeros(2), "b": torch.zeros(3).bfloat16()}, 64)
    with pytest.raises(RunError, match=message):
        layout.check(own)


def test_a_bucket_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="bucket of 15 bytes is too small: give at least 16"):
        BucketLayout.of({}, 15)


def test_bytes_of_a_spec() -> None:
    assert TensorSpec("x", torch.bfloat16, (3, 5)).nbytes == 30
    assert TensorSpec("x", torch.float32, ()).nbytes == 4
    assert TensorSpec("x", torch.float32, (0, 5)).nbytes == 0
