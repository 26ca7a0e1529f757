"""The digest sees every byte, its place and their number, and nothing else."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from torch import Tensor

from roll.weight_sync.digest import BLOCK_WORDS, digest, digests, finish, partial_sum

BLOCK_BYTES = 4 * BLOCK_WORDS
BYTES = st.binary(min_size=1, max_size=200)


def tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def mixed(x: int) -> int:
    mask = (1 << 64) - 1
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return x ^ x >> 31


def in_python(data: bytes) -> int:
    """The definition in Python's integers, for less than a block."""
    gamma, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    words = struct.unpack(f"<{-(-len(data) // 4)}i", data + bytes(-len(data) % 4))
    weight = [mixed((i + 1) * gamma & mask) | 1 for i in range(len(words))]
    block = mixed((BLOCK_WORDS + 1) * gamma & mask) | 1
    total = sum(word * weight for word, weight in zip(words, weight, strict=True)) * block
    return mixed(total + len(data) * gamma & mask)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_it_is_what_the_definition_says(data: bytes) -> None:
    assert digest(tensor_of(data)) == in_python(data)
    assert 0 <= digest(tensor_of(data)) < 1 << 64


@settings(deadline=None)
@given(BYTES, st.data())
def test_a_changed_byte_changes_it(data: bytes, draw: st.DataObject) -> None:
    changed = bytearray(data)
    changed[draw.draw(st.integers(0, len(data) - 1))] ^= draw.draw(st.integers(1, 255))
    assert digest(tensor_of(changed)) != digest(tensor_of(data))


@settings(deadline=None)
@given(BYTES, st.integers(1, 20))
def test_zeros_at_the_end_count(data: bytes, zeros: int) -> None:
    assert digest(tensor_of(data + bytes(zeros))) != digest(tensor_of(data))
    assert digest(tensor_of(bytes(zeros))) != digest(tensor_of(b""))


@settings(deadline=None)
@given(st.binary(min_size=8, max_size=200), st.data())
def test_swapped_parts_change_it(data: bytes, draw: st.DataObject) -> None:
    size = draw.draw(st.integers(1, len(data) // 2))
    first = draw.draw(st.integers(0, len(data) - 2 * size))
    second = draw.draw(st.integers(first + size, len(data) - size))
    a, b = data[first : first + size], data[second : second + size]
    assume(a != b)
    swapped = data[:first] + b + data[first + size : second] + a + data[second + size :]
    assert digest(tensor_of(swapped)) != digest(tensor_of(data))


@settings(deadline=None)
@given(st.integers(1, 40), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), st.data())
def test_changed_signs_do_not_cancel(count: int, dtype: torch.dtype, draw: st.DataObject) -> None:
    values = torch.ones(count, dtype=dtype)
    signs = draw.draw(st.lists(st.sampled_from([1.0, -1.0]), min_size=count, max_size=count).filter(lambda s: -1.0 in s))
    assert digest(values * torch.tensor(signs, dtype=dtype)) != digest(values)


@pytest.fixture(scope="module")
def large() -> Tensor:
    """A little more than two blocks, with bytes after the last whole word."""
    return torch.randint(0, 256, (2 * BLOCK_BYTES + 7,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


EDGES = [place + d for place in (BLOCK_BYTES, 2 * BLOCK_BYTES) for d in (-5, -4, -1, 0, 1, 3, 4, 6)]


@settings(max_examples=examples(25), deadline=None)
@given(position=st.one_of(st.sampled_from(EDGES), st.integers(0, 2 * BLOCK_BYTES + 6)), flip=st.integers(1, 255))
def test_a_changed_byte_changes_it_anywhere(large: Tensor, position: int, flip: int) -> None:
    large[position] ^= flip
    changed = digest(large)
    large[position] ^= flip
    assert changed != digest(large)


def test_swapped_blocks_change_it(large: Tensor) -> None:
    swapped = torch.cat([large[BLOCK_BYTES : 2 * BLOCK_BYTES], large[:BLOCK_BYTES], large[2 * BLOCK_BYTES :]])
    assert digest(swapped) != digest(large)
    moved = large.roll(BLOCK_BYTES)
    assert digest(moved) != digest(large)


@pytest.mark.parametrize("size", [BLOCK_BYTES + d for d in (-4, -1, 0, 1, 4)])
def test_sizes_about_a_block(large: Tensor, size: int) -> None:
    assert digest(large[:size]) == digest(large[:size].clone())
    assert len({digest(large[: size + d]) for d in (-1, 0, 1)}) == 3


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 6, 8])
def test_where_the_bytes_lie_does_not_count(large: Tensor, offset: int) -> None:
    for size in (1000, 1001):
        part = large[offset : offset + size]
        assert digest(part) == digest(part.clone())


def test_only_bytes_count() -> None:
    data = torch.arange(24, dtype=torch.int32)
    views = [data.view(dtype) for dtype in (torch.uint8, torch.float32, torch.bfloat16, torch.int64)]
    assert (
        len({digest(view) for view in [*views, data.reshape(2, 3, 4), torch.nn.Parameter(data.view(torch.float32))]}) == 1
    )


def test_strides_do_not_count() -> None:
    grid = torch.arange(35.0).reshape(5, 7)
    for view in (grid.T, grid[:, ::2], grid[1::2]):
        assert not view.is_contiguous()
        assert digest(view) == digest(view.contiguous())
    assert digest(torch.tensor(3.0)) == digest(torch.tensor([3.0]))


def test_many_at_once_are_as_each_alone(large: Tensor) -> None:
    tensors = {"a": torch.arange(5), "large": large, "none": torch.empty(0), "b": torch.ones(3).bool()}
    assert digests(tensors) == {name: digest(tensor) for name, tensor in tensors.items()}
    assert digests({}) == {}


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=300), st.lists(st.integers(0, 300), max_size=6))
def test_parts_of_a_tensor_sum_to_its_digest_wherever_it_is_cut(data: bytes, cuts: list[int]) -> None:
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    whole, device = tensor_of(data), torch.device("cpu")
    parts = [partial_sum([(begin, whole[begin:end])], device) for begin, end in pairwise(bounds)]
    assert finish(sum(int(part) for part in parts), len(data)) == digest(whole)


def test_parts_cut_across_blocks_and_words_sum_to_the_digest() -> None:
    whole = torch.randint(0, 256, (2 * BLOCK_BYTES + 7,), dtype=torch.uint8)
    bounds = [0, 3, BLOCK_BYTES - 1, BLOCK_BYTES + 2, 2 * BLOCK_BYTES, len(whole)]
    pieces = [(begin, whole[begin:end]) for begin, end in pairwise(bounds)]
    shards = (pieces[::2], pieces[1::2])
    total = sum(int(partial_sum(shard, whole.device)) for shard in shards)
    assert finish(total, len(whole)) == digest(whole)


def test_a_changed_byte_in_one_part_changes_the_digest_of_the_whole() -> None:
    whole = torch.arange(100, dtype=torch.uint8)
    damaged = whole.clone()
    damaged[57] ^= 1
    sums = [int(partial_sum([(0, whole[:50])], whole.device)), int(partial_sum([(50, damaged[50:])], whole.device))]
    assert finish(sum(sums), 100) != digest(whole)
