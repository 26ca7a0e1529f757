"""Tensors published from shards: the digests and the bytes are those of the whole tensors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from torch import Tensor

from roll.cluster.mesh import MeshShape
from roll.strategy.train.sharded.process_group import RankGroup
from roll.weight_sync import shards
from roll.weight_sync.digest import digest, digests, finish, partial_sum
from roll.weight_sync.layout import BucketLayout, TensorSpec, specs_of, unpack, used_bytes
from roll.weight_sync.shards import Shard, ShardedTensors
from tests.ranks import Ranks, ranks_of

Cut = tuple[tuple[int, ...], torch.dtype, int, list[int]]
"""A tensor's shape and precision, the dimension it is cut in, and where each rank's part ends."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with ranks_of(MeshShape(shard=3)) as made:
        yield made


def tensor_of(number: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(dtype)


def box_of(shape: tuple[int, ...], cuts: dict[int, tuple[int, int]]) -> tuple[slice, ...]:
    """All of a tensor but where it is cut."""
    return tuple(slice(*cuts.get(dim, (0, size))) for dim, size in enumerate(shape))


def publish(group: RankGroup, cuts: list[Cut], bucket_bytes: int, damaged: int | None = None) -> Any:
    """What the first rank has of the tensors: their digests, their values from buckets, and its room's bytes."""
    wholes = {f"t{number}": tensor_of(number, shape, dtype) for number, (shape, dtype, _, _) in enumerate(cuts)}

    def shard_of(name: str) -> Shard:
        shape, _, dim, ends = cuts[int(name[1:])]
        begin, end = [0, *ends][group.rank], ends[group.rank]
        box = box_of(shape, {dim: (begin, end)})
        values = wholes[name][box].contiguous()
        if damaged == group.rank and values.numel():
            values.view(-1)[0] += 1
        return Shard.of(shape, box, values)

    assert dist.group.WORLD is not None
    source = ShardedTensors(specs_of(wholes), shard_of, dist.group.WORLD, group.device)
    layout = BucketLayout.of_specs(source.specs, bucket_bytes)
    found = source.digests()
    received = {name: torch.zeros_like(whole) for name, whole in wholes.items()}
    for spans in layout.buckets:
        bucket = torch.empty(bucket_bytes, dtype=torch.uint8) if group.is_first else None
        source.pack(bucket, spans)
        if bucket is not None:
            unpack(bucket, spans, received)
    room = 0 if source._buffer is None else source._buffer.nbytes
    equal = all(torch.equal(received[name].view(torch.uint8), whole.view(torch.uint8)) for name, whole in wholes.items())
    return found, digests(wholes), equal, room


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    ends = sorted(draw(st.integers(0, shape[dim])) for _ in range(2))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
    return shape, dtype, dim, [*ends, shape[dim]]


@settings(deadline=None, max_examples=examples(40))
@given(tensors=st.lists(cuts(), min_size=1, max_size=4), bucket_bytes=st.sampled_from([16, 48, 1024]))
def test_digests_and_buckets_are_those_of_the_whole_tensors(ranks: Ranks, tensors: list[Cut], bucket_bytes: int) -> None:
    results = ranks.run(publish, tensors, bucket_bytes)
    for found, expected, _, room in results:
        assert found == expected
        assert room <= bucket_bytes
    assert results[0][2]
    assert results[0][3] == 0, "the first rank adds in the bucket that it is given"


def test_a_tensor_larger_than_a_bucket_needs_one_bucket_of_room(ranks: Ranks) -> None:
    cut: Cut = ((301, 33), torch.bfloat16, 0, [101, 202, 301])
    results = ranks.run(publish, [cut], 512)
    found, expected, equal, _ = results[0]
    assert found == expected
    assert equal
    assert [room for *_, room in results] == [0, 512, 512]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_damaged_shard_changes_the_digest_of_its_tensor_alone(ranks: Ranks, rank: int) -> None:
    tensors: list[Cut] = [((6, 4), torch.float32, 0, [2, 4, 6]), ((6,), torch.bfloat16, 0, [0, 0, 6])]
    found, expected, equal, _ = ranks.run(publish, tensors, 64, rank)[0]
    assert found["t0"] != expected["t0"]
    assert (found["t1"] != expected["t1"]) == (rank == 2)
    assert not equal


@settings(deadline=None)
@given(cut=cuts(), bucket_bytes=st.sampled_from([16, 48, 1024]), block=st.integers(1, 30))
def test_no_more_of_a_shard_is_read_than_a_span_needs(cut: Cut, bucket_bytes: int, block: int) -> None:
    """And never more than a block of it at once: that much is cast, not the shard."""
    shape, _, dim, ends = cut
    begin, end = ends[0], ends[1]
    values = tensor_of(1, shape, torch.float32)
    box = box_of(shape, {dim: (begin, end)})
    part = values[box].contiguous()
    read: list[tuple[int, int]] = []

    def reading(start: int, stop: int) -> Tensor:
        read.append((start, stop))
        return part.view(-1)[start:stop]

    shard = Shard.reading(shape, box, torch.bfloat16, reading)
    layout = BucketLayout.of_specs([TensorSpec("t", torch.bfloat16, shape)], bucket_bytes)
    served, expected = torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(shape, dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "BLOCK_ELEMENTS", block)
        for spans in layout.buckets:
            bucket = torch.zeros(used_bytes(spans), dtype=torch.uint8)
            for span in spans:
                shard.copy_span(span, bucket)
            unpack(bucket, spans, {"t": served})
    expected[box].copy_(part)
    assert torch.equal(served, expected)
    assert all(0 < stop - start <= block for start, stop in read)
    assert sum(stop - start for start, stop in read) == part.numel(), "every element once"


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[slice, ...]]]:
    """A shape, and boxes that make up a tensor of it, cut in its first dimension and in another."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=2, max_size=3)))
    other = draw(st.integers(1, len(shape) - 1))
    ends = {dim: sorted({0, shape[dim], draw(st.integers(0, shape[dim]))}) for dim in (0, other)}
    ranges = [[(dim, pair) for pair in pairwise(ends[dim])] for dim in (0, other)]
    return shape, [box_of(shape, dict(each)) for each in product(*ranges)]


@settings(deadline=None)
@given(cut=boxes(), bucket_bytes=st.sampled_from([16, 48, 1024]), block=st.integers(1, 40))
def test_boxes_of_a_tensor_that_is_cut_twice_make_up_its_bytes_and_its_digest(
    cut: tuple[tuple[int, ...], list[tuple[slice, ...]]], bucket_bytes: int, block: int
) -> None:
    shape, parts = cut
    whole = tensor_of(2, shape, torch.bfloat16)
    made = [Shard.of(shape, box, whole[box].contiguous()) for box in parts]
    layout = BucketLayout.of_specs([TensorSpec("t", torch.bfloat16, shape)], bucket_bytes)
    served, device = torch.zeros_like(whole), torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "BLOCK_ELEMENTS", block)
        for spans in layout.buckets:
            bucket = torch.zeros(used_bytes(spans), dtype=torch.uint8)
            for span in spans:
                for shard in made:
                    shard.copy_span(span, bucket)
            unpack(bucket, spans, {"t": served})
        total = sum(int(partial_sum(shard.pieces(), device)) for shard in made)
    assert torch.equal(served, whole)
    assert finish(total, whole.nbytes) == digest(whole)
