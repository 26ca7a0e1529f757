"""Token columns in blocks, here or elsewhere: choosing and joining samples gives what plain lists would."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

import roll.data.remote_columns
from roll.data import Batch, Sample, Task
from roll.data.batch import LOG_COLUMNS, token_block
from roll.data.remote_columns import (
    ColumnBlock,
    Columns,
    Indices,
    RemoteRef,
    TokenColumn,
    block_to_remote,
    blocks_of,
    resolve,
    to_remote,
)

CASES = settings(max_examples=examples(80), deadline=None, derandomize=True)


class Store:
    """Memory elsewhere: keeps columns under references, and counts what is fetched."""

    def __init__(self) -> None:
        self.kept: list[Columns] = []
        self.fetched: list[list[int]] = []

    def put(self, columns: Columns) -> int:
        self.kept.append(columns)
        return len(self.kept) - 1

    def fetch(self, refs: Sequence[int]) -> list[Columns]:
        self.fetched.append(list(refs))
        return [self.kept[ref] for ref in refs]


def indices(values: Sequence[int]) -> Indices:
    return np.array(values, np.int64)


@st.composite
def columns(draw: st.DrawFn, key: str = "values") -> tuple[TokenColumn, list[list[int]], Indices]:
    """A column, the same as plain lists, and its samples' lengths."""
    groups = draw(st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=4))
    blocks, which, starts, rows = [], [], [], []
    token = 0
    for number, lengths in enumerate(groups):
        values: list[int] = []
        for length in lengths:
            which.append(number)
            starts.append(len(values))
            rows.append(list(range(token, token + length)))
            values += rows[-1]
            token += length
        blocks.append(ColumnBlock({key: np.array(values, np.int32), "other": np.zeros(len(values), np.int32)}))
    column = TokenColumn(tuple(blocks), indices(which), indices(starts), key)
    return column, rows, indices([len(row) for row in rows])


def listed(column: TokenColumn, lengths: Indices) -> list[list[int]]:
    return [row.tolist() for row in column.rows(lengths)]


# columns against plain lists


@CASES
@given(columns(), st.data())
def test_selecting_is_choosing_rows(made: tuple[TokenColumn, list[list[int]], Indices], data: st.DataObject) -> None:
    column, rows, lengths = made
    chosen = indices(data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10)) if rows else [])
    picked = column.select(chosen)
    assert listed(picked, lengths[chosen]) == [rows[i] for i in chosen]
    assert picked.gather(lengths[chosen], np.zeros(0, np.int32)).tolist() == [value for i in chosen for value in rows[i]]
    assert {id(block) for block in picked.blocks} == {id(column.blocks[column.block_index[i]]) for i in chosen}
    again = indices(data.draw(st.lists(st.integers(0, len(chosen) - 1), max_size=10)) if len(chosen) else [])
    assert listed(picked.select(again), lengths[chosen][again]) == [rows[chosen[i]] for i in again]


@CASES
@given(columns())
def test_gathering_is_one_array_of_all_rows(made: tuple[TokenColumn, list[list[int]], Indices]) -> None:
    column, rows, lengths = made
    gathered = column.gather(lengths, np.zeros(0, np.int32))
    assert gathered.tolist() == [value for row in rows for value in row]
    assert gathered.dtype == np.int32


@CASES
@given(st.lists(columns(), min_size=1, max_size=3), st.sampled_from(["values", "ids"]), st.randoms())
def test_joining_puts_every_sample_where_it_belongs(
    made: list[tuple[TokenColumn, list[list[int]], Indices]], key: str, order: Any
) -> None:
    whole = [row for _, rows, _ in made for row in rows]
    places = list(range(len(whole)))
    order.shuffle(places)
    parts, at = [], 0
    for _, rows, _ in made:
        parts.append(indices(places[at : at + len(rows)]))
        at += len(rows)
    expected: list[list[int]] = [[] for _ in whole]
    for place, row in zip(places, whole, strict=True):
        expected[place] = row
    renamed = [made[0][0], *(column.with_key(key) for column, _, _ in made[1:])]
    joined = TokenColumn.concat(renamed, parts)
    assert listed(joined, indices([len(row) for row in expected])) == expected


def test_rows_and_one_block_in_order_are_views() -> None:
    values = np.arange(10, dtype=np.int32)
    column = TokenColumn.flat(values, indices([0, 3, 3, 10]))
    assert [row.tolist() for row in column.rows(indices([3, 0, 7]))] == [[0, 1, 2], [], list(range(3, 10))]
    assert all(np.shares_memory(row, values) for row in column.rows(indices([3, 0, 7])) if len(row))
    assert np.shares_memory(column.gather(indices([3, 0, 7]), np.zeros(0, np.int32)), values)
    some = column.select(indices([1, 2]))
    assert np.shares_memory(some.gather(indices([0, 7]), np.zeros(0, np.int32)), values)
    turned = column.select(indices([2, 0]))
    assert turned.gather(indices([7, 3]), np.zeros(0, np.int32)).tolist() == [*range(3, 10), 0, 1, 2]


def test_the_example_of_the_docstring() -> None:
    blocks = (ColumnBlock({"values": np.arange(5)}), ColumnBlock({"values": np.arange(10, 15)}))
    column = TokenColumn(blocks, indices([0, 0, 1, 1]), indices([0, 3, 0, 4]))
    lengths = indices([3, 2, 4, 1])
    assert listed(column, lengths) == [[0, 1, 2], [3, 4], [10, 11, 12, 13], [14]]
    picked = column.select(indices([3, 0]))
    assert (picked.block_index.tolist(), picked.starts.tolist()) == ([1, 0], [4, 0])
    assert listed(picked, lengths[[3, 0]]) == [[14], [0, 1, 2]]


# elsewhere


def test_a_column_elsewhere_cannot_be_read_and_says_what_to_do() -> None:
    column = to_remote(TokenColumn.flat(np.arange(3), indices([0, 3])), Store().put)
    assert not column.is_local
    for read in (lambda: column.rows(indices([3])), lambda: column.gather(indices([3]), np.zeros(0, np.int32))):
        with pytest.raises(LookupError, match="in other processes: fetch the batch"):
            read()
    with pytest.raises(LookupError, match="in other processes"):
        column.with_key("ids")


@CASES
@given(columns(), st.data())
def test_what_is_put_away_comes_back(made: tuple[TokenColumn, list[list[int]], Indices], data: st.DataObject) -> None:
    column, rows, lengths = made
    store = Store()
    gone = to_remote(column, store.put)
    assert len(store.kept) == len(column.blocks)
    assert to_remote(gone, store.put).blocks == gone.blocks  # what is elsewhere stays there
    assert len(store.kept) == len(column.blocks)
    chosen = indices(data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8)) if rows else [])
    back = resolve({"a": gone.select(chosen), "b": gone}, store.fetch)
    assert listed(back["a"], lengths[chosen]) == [rows[i] for i in chosen]
    assert listed(back["b"], lengths) == rows
    assert [sorted(refs) for refs in store.fetched] == ([list(range(len(column.blocks)))] if column.blocks else [])


def test_nothing_is_fetched_of_what_is_here() -> None:
    column = TokenColumn.flat(np.arange(3), indices([0, 3]))
    store = Store()
    assert resolve({"a": column}, store.fetch)["a"] is column
    assert store.fetched == []


def test_a_block_that_is_elsewhere_is_not_put_away_again() -> None:
    block = ColumnBlock(RemoteRef("there"))
    assert block_to_remote(block, Store().put) is block


def test_blocks_are_counted_once() -> None:
    first, second = (TokenColumn.flat(np.arange(3), indices([0, 3])) for _ in range(2))
    shared = TokenColumn((*first.blocks, *second.blocks, *first.blocks), indices([0]), indices([0]))
    assert blocks_of([first, shared, second]) == [*first.blocks, *second.blocks]


# batches


def sample(number: int, length: int, group: int = 0) -> Sample:
    made = Sample(f"{group}.{number}", Task.ask(f"t{group}", "?"), group, 1.0, reward=float(number), turns=1)
    made.log.prompt([100 * number + i for i in range(length)])
    routes = np.arange((length + 1) * 3, dtype=np.uint8).reshape(-1, 3) if number % 2 else None  # some have none
    made.log.respond([7, 8], [-0.5, -number - 1.0], [number, number + 1], routes)
    return made


def batch_elsewhere(groups: Sequence[Sequence[Sample]], store: Store) -> Batch:
    """A batch as the pool makes it: a block a group, elsewhere."""
    samples = [each for group in groups for each in group]
    lengths = [len(each.log) for each in samples]
    which = indices([number for number, group in enumerate(groups) for _ in group])
    starts = indices([sum(len(s.log) for s in group[:i]) for group in groups for i in range(len(group))])
    return Batch.from_blocks(
        samples, lengths, [block_to_remote(token_block(g), store.put) for g in groups], which, starts
    )


def assert_same(a: Batch, b: Batch) -> None:
    assert a.offsets.tolist() == b.offsets.tolist()
    assert set(a.columns) == set(b.columns)
    for name in a.columns:
        assert a[name].tolist() == b[name].tolist(), name


GROUPS = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=4)


def made_of(lengths: list[list[int]]) -> list[list[Sample]]:
    return [[sample(i, length, g) for i, length in enumerate(group)] for g, group in enumerate(lengths)]


@CASES
@given(GROUPS, st.data())
def test_a_batch_elsewhere_is_the_batch_when_it_is_fetched(lengths: list[list[int]], data: st.DataObject) -> None:
    groups = made_of(lengths)
    store = Store()
    batch = batch_elsewhere(groups, store)
    plain = Batch.from_samples([each for group in groups for each in group])
    assert batch["sample"].tolist() == plain["sample"].tolist()
    assert batch.lengths.tolist() == plain.lengths.tolist()
    chosen = data.draw(st.lists(st.integers(0, len(batch) - 1), max_size=8))
    picked = batch.select(chosen)
    assert store.fetched == []
    assert len(picked.blocks) == len({plain["group"][i] for i in chosen})
    assert_same(picked.resolved(store.fetch), plain.select(chosen))
    assert sum(map(len, store.fetched)) == len(picked.blocks)  # all columns, each reference once
    assert_same(pickle.loads(pickle.dumps(picked)).resolved(store.fetch), plain.select(chosen))


@CASES
@given(GROUPS, GROUPS, st.booleans(), st.booleans())
def test_batches_here_and_elsewhere_join_in_either_order(
    first: list[list[int]], second: list[list[int]], turned: bool, travelled: bool
) -> None:
    store = Store()
    here = Batch.from_samples([each for group in made_of(first) for each in group])
    there = batch_elsewhere(made_of(second), store)
    plain = Batch.from_samples([each for group in made_of(second) for each in group])
    if travelled:
        here = pickle.loads(pickle.dumps(here))
    pair = [there, here] if turned else [here, there]
    joined = Batch.concat(pair)
    assert store.fetched == []
    assert_same(joined.resolved(store.fetch), Batch.concat([plain, here] if turned else [here, plain]))


def test_columns_elsewhere_under_different_names_cannot_be_joined() -> None:
    store = Store()
    one, other = (to_remote(TokenColumn.flat(np.arange(2), indices([0, 2])), store.put) for _ in range(2))
    other = TokenColumn(other.blocks, other.block_index, other.starts, "ids")
    with pytest.raises(LookupError, match="in other processes"):
        TokenColumn.concat([one, other], [indices([0]), indices([1])])


def test_a_batch_here_travels_with_its_own_samples_only() -> None:
    samples = [sample(number, 10_000) for number in range(20)]
    batch = Batch.from_samples(samples)
    whole, one = len(pickle.dumps(batch)), pickle.dumps(batch.select([7]))
    assert len(one) < whole / 15
    assert_same(pickle.loads(one), batch.select([7]))
    assert_same(pickle.loads(pickle.dumps(batch.select([9, 3]))), batch.select([9, 3]))


def test_a_batch_elsewhere_travels_as_references() -> None:
    store = Store()
    batch = batch_elsewhere([[sample(0, 10_000), sample(1, 10_000)]], store)
    assert len(pickle.dumps(batch)) < 4000
    travelled = pickle.loads(pickle.dumps(batch))
    assert len(travelled.blocks) == 1  # its columns still share it
    travelled.resolved(store.fetch)
    assert store.fetched == [[0]]


def test_turns_are_here_wherever_the_tokens_are() -> None:
    store = Store()
    played = [sample(number, 3) for number in range(3)]
    for each, rewards in zip(played, ([1.0], [2.0, 3.0], [4.0, 5.0, 6.0]), strict=True):
        each.turns, each.turn_rewards, each.turn_states = len(rewards), rewards, [int(reward) for reward in rewards]
    batch = batch_elsewhere([played], store).with_columns(turn_advantage=np.arange(6))
    picked = pickle.loads(pickle.dumps(batch.select([2, 0])))
    assert [row.tolist() for row in picked.rows("turn_reward")] == [[4.0, 5.0, 6.0], [1.0]]
    assert store.fetched == []
    assert picked.resolved(store.fetch)["turn_advantage"].tolist() == [3, 4, 5, 0]


def test_selecting_lets_go_of_what_is_not_chosen() -> None:
    batch = Batch.concat([Batch.from_samples([sample(0, 3)]), Batch.from_samples([sample(1, 3)])])
    released = [weakref.ref(block) for block in batch.blocks]
    kept = batch.select([1])
    del batch
    gc.collect()
    assert [ref() is None for ref in released] == [True, False]
    assert kept.ids.tolist() == [100, 101, 102, 7, 8]


def test_a_column_of_other_samples_is_refused() -> None:
    batch = Batch.from_samples([sample(0, 3), sample(1, 2)])
    with pytest.raises(ValueError, match="column 'ref' has 1 samples' tokens, expected 2"):
        batch.with_columns(ref=TokenColumn.flat(np.zeros(3), indices([0, 3])))
    with pytest.raises(ValueError, match="column 'reward' has 2 samples' tokens, expected 2"):
        batch.with_columns(reward=TokenColumn.flat(np.zeros(9), batch.offsets))
    with pytest.raises(AssertionError, match="'reward' has one value per sample"):
        batch.rows("reward")


def test_a_computed_column_may_be_elsewhere_beside_columns_here() -> None:
    store = Store()
    batch = Batch.from_samples([sample(0, 3), sample(1, 2)])
    values = np.arange(batch.tokens, dtype=np.float32)
    more = batch.with_columns(ref=to_remote(TokenColumn.flat(values, batch.offsets), store.put))
    assert more.ids.tolist() == batch.ids.tolist()
    with pytest.raises(LookupError):
        more["ref"]
    assert more.select([1]).resolved(store.fetch)["ref"].tolist() == [5, 6, 7, 8]
    assert {block.columns.ref for block in more.blocks if isinstance(block.columns, RemoteRef)} == {0}
    assert LOG_COLUMNS == ("ids", "loss_mask", "behaviour", "versions", "turn", "routes")


@given(lengths=st.lists(st.integers(0, 12), max_size=30), most=st.integers(1, 20))
def test_blocks_hold_all_samples_in_order_and_no_more_than_they_may(lengths: list[int], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roll.data.remote_columns, "BLOCK_TOKENS", most)
        blocks = roll.data.remote_columns.cut_into_blocks(lengths)
    assert [number for block in blocks for number in block] == list(range(len(lengths)))
    sizes = [sum(lengths[number] for number in block) for block in blocks]
    assert all(size <= most or len(block) == 1 for size, block in zip(sizes, blocks, strict=True))
    assert all(size + lengths[after[0]] > most for size, after in zip(sizes, blocks[1:], strict=False))
