"""The pool of blocks: nothing is lost, nothing is given twice, and a key finds only what it names."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis_examples import examples

from roll.engine.paged.blocks import BlockPool, keys_of

SIZE = 4
COUNT = 12


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_equal_beginnings_have_equal_keys_under_one_version_only() -> None:
    a = keys_of(tokens(*range(11)), SIZE, 3)
    assert len(a) == 2
    assert keys_of(tokens(*range(8), 99), SIZE, 3) == a
    assert keys_of(tokens(*range(11)), SIZE, 4) != a
    changed = keys_of(tokens(9, *range(1, 11)), SIZE, 3)
    assert not set(changed) & set(a), "a key stands for all tokens before its block too"
    assert keys_of(tokens(*range(12)), SIZE, 3, a) == keys_of(tokens(*range(12)), SIZE, 3)


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(
    values=st.lists(st.integers(0, (1 << 31) - 1), max_size=4 * SIZE + 3),
    known=st.integers(0, 4),
    version=st.integers(-1, 1 << 40),
)
def test_keys_that_continue_known_ones_are_those_computed_from_the_start(
    values: list[int], known: int, version: int
) -> None:
    whole = keys_of(tokens(*values), SIZE, version)
    assert len(whole) == len(values) // SIZE
    assert keys_of(tokens(*values), SIZE, version, whole[:known]) == whole
    plain, parent = [], version.to_bytes(8, "little", signed=True)
    for start in range(0, len(values) - SIZE + 1, SIZE):
        block = np.array(values[start : start + SIZE], np.int64)
        parent = hashlib.blake2b(parent + block.tobytes(), digest_size=16).digest()
        plain.append(parent)
    assert whole == plain


def test_what_was_used_last_is_given_away_last_and_beginnings_outlive_what_follows() -> None:
    pool = BlockPool(COUNT, SIZE)
    first, second = pool.take(3), pool.take(3)
    for blocks, start in ((first, 0), (second, 100)):
        for block, key in zip(blocks, keys_of(tokens(*range(start, start + 12)), SIZE, 0), strict=True):
            pool.register(block, key)
    pool.release(first)
    pool.release(second)
    pool.take(5)  # all that never had contents
    assert pool.take(1) == [first[2]]
    assert pool.take(2) == [first[1], first[0]]
    assert pool.find(keys_of(tokens(*range(12)), SIZE, 0)) == []
    assert pool.find(keys_of(tokens(*range(100, 112)), SIZE, 0)) == second


def test_a_pool_needs_a_block_beside_the_one_for_padding() -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        BlockPool(1, SIZE)


class Pool(RuleBasedStateMachine):
    """Sequences of few kinds of tokens come, share, grow and go; `contents` is what each block would hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(COUNT, SIZE)
        self.version = 0
        self.contents: dict[int, tuple[int, ...]] = {}
        self.running: list[tuple[list[int], list[int], int]] = []

    @rule(values=st.lists(st.integers(0, 1), min_size=1, max_size=16))
    def come(self, values: list[int]) -> None:
        keys = keys_of(np.array(values, np.int32), SIZE, self.version)
        shared = self.pool.find(keys)
        for i, block in enumerate(shared):
            assert self.contents[block] == (self.version, *values[: (i + 1) * SIZE]), "a key found something else"
        fresh = -(-len(values) // SIZE) - len(shared)
        if fresh + self.pool.spare_among(shared) > self.pool.spare:
            return
        self.pool.use(shared)
        taken = self.pool.take(fresh)
        for i, block in enumerate(taken, len(shared)):
            self.contents[block] = (self.version, *values[: (i + 1) * SIZE])
        blocks = shared + taken
        for block, key in zip(blocks, keys, strict=False):
            self.pool.register(block, key)
        self.running.append((blocks, values, self.version))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        blocks, *_ = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.pool.release(blocks)

    @rule()
    def new_weights(self) -> None:
        self.version += 1
        self.pool.evict_all()

    @invariant()
    def nothing_is_lost_or_given_twice(self) -> None:
        used = {block for blocks, *_ in self.running for block in blocks}
        assert 0 not in used
        assert self.pool.used == len(used)
        assert self.pool.used + self.pool.spare == COUNT - 1

    @invariant()
    def running_sequences_keep_their_contents(self) -> None:
        for blocks, values, version in self.running:
            for i, block in enumerate(blocks):
                assert self.contents[block] == (version, *values[: (i + 1) * SIZE])


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
