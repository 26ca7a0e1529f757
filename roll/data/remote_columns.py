"""Token columns that may be remote: blocks of flat arrays, in this process or as a reference to another one.

Invariants: sample i's values of a column are `length_i` consecutive values of one block, from `starts[i]` on. A value is
a number, or, for routes (`routes.py`), a row of them. Selecting and joining samples only changes indices; the values are
read where they are used, without a copy if the layout allows it.

Example: two groups of two samples with 3, 2 and 4, 1 tokens, one block per group: `block_index = [0, 0, 1, 1]`,
`starts = [0, 3, 0, 4]`. Its samples 3 and 0: `block_index = [1, 0]`, `starts = [4, 0]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from roll.data.routes import to_common_width

Array = NDArray[Any]
Indices = NDArray[np.int64]
Columns = Mapping[str, Array]

BLOCK_TOKENS = 1 << 22
"""Maximum number of tokens per block: tens of megabytes (gigabytes with routes), so that the overhead is small."""

_VALUES = "values"


@dataclass(frozen=True)
class RemoteRef:
    """Reference to a block's columns in another process. Only the executor that created it can fetch it."""

    ref: Any


@dataclass(frozen=True, eq=False)
class ColumnBlock:
    """Flat token columns of some samples, concatenated."""

    columns: Columns | RemoteRef

    def column(self, name: str) -> Array:
        if isinstance(self.columns, RemoteRef):
            raise LookupError("the values of this column are in other processes: fetch the batch to read them here")
        return self.columns[name]


Fetch = Callable[[Sequence[Any]], Sequence[Columns]]
"""Resolves references to their columns, all at once."""


@dataclass(frozen=True, eq=False)
class TokenColumn:
    """One column: for each sample, the index of the block that holds its values, and where they begin in it."""

    blocks: tuple[ColumnBlock, ...]
    block_index: Indices
    starts: Indices
    key: str = _VALUES
    """The column's name in its blocks."""

    @classmethod
    def flat(cls, values: Array, offsets: Indices) -> TokenColumn:
        """A column that is in this process in one piece."""
        starts = offsets[:-1]
        return cls((ColumnBlock({_VALUES: values}),), np.zeros(len(starts), np.int64), starts)

    def rows(self, lengths: Indices) -> list[Array]:
        """Each sample's values, as views."""
        arrays = self._arrays()
        spans = zip(self.block_index.tolist(), self.starts.tolist(), lengths.tolist(), strict=True)
        return [arrays[block][start : start + length] for block, start, length in spans]

    def _arrays(self) -> list[Array]:
        arrays = [block.column(self.key) for block in self.blocks]
        return to_common_width(arrays) if arrays and arrays[0].ndim > 1 else arrays

    def gather(self, lengths: Indices, none: Array) -> Array:
        """All values in one array: a view if they are contiguous, otherwise a copy; `none` if there are no values."""
        if len(self.blocks) == 1 and len(lengths):
            expected = self.starts[0] + np.concatenate([[0], np.cumsum(lengths[:-1])])
            if np.array_equal(self.starts, expected):
                return self.blocks[0].column(self.key)[self.starts[0] : self.starts[0] + int(lengths.sum())]
        rows = self.rows(lengths)
        return np.concatenate(rows) if rows else none

    def select(self, indices: Indices) -> TokenColumn:
        """The samples at `indices`; unused blocks are released."""
        used, block_index = np.unique(self.block_index[indices], return_inverse=True)
        blocks = tuple(self.blocks[block] for block in used)
        return TokenColumn(blocks, block_index.astype(np.int64).reshape(-1), self.starts[indices], self.key)

    @staticmethod
    def concat(columns: Sequence[TokenColumn], parts: Sequence[Indices]) -> TokenColumn:
        """One column of all samples, joined from columns of some of them: the samples at `parts[i]` are in
        `columns[i]`."""
        blocks: list[ColumnBlock] = []
        remote_keys = [column.key for column in columns if not column.is_local]  # remote blocks cannot be renamed
        key = (remote_keys or [column.key for column in columns] or [_VALUES])[0]
        samples = sum(len(part) for part in parts)
        block_index, starts = np.zeros(samples, np.int64), np.zeros(samples, np.int64)
        for column, part in zip(columns, parts, strict=True):
            if column.key != key:
                column = column.with_key(key)
            block_index[part] = column.block_index + len(blocks)
            starts[part] = column.starts
            blocks.extend(column.blocks)
        return TokenColumn(tuple(blocks), block_index, starts, key)

    def with_key(self, key: str) -> TokenColumn:
        """The same values under another name in their blocks, which must be local."""
        blocks = tuple(ColumnBlock({key: block.column(self.key)}) for block in self.blocks)
        return TokenColumn(blocks, self.block_index, self.starts, key)

    @property
    def is_local(self) -> bool:
        return not any(isinstance(block.columns, RemoteRef) for block in self.blocks)


def cut_into_blocks(lengths: Sequence[int] | Indices) -> list[list[int]]:
    """Groups samples of these lengths, in order, into lists of indices, one list per block."""
    blocks: list[list[int]] = []
    tokens = 0
    for number, length in enumerate(lengths):
        if not blocks or tokens + length > BLOCK_TOKENS:
            blocks.append([])
            tokens = 0
        blocks[-1].append(number)
        tokens += int(length)
    return blocks


def resolve(columns: Mapping[str, TokenColumn], fetch: Fetch) -> dict[str, TokenColumn]:
    """The columns with every block fetched, each reference once."""
    missing = {id(block): block for column in columns.values() for block in column.blocks if _is_remote(block)}
    if not missing:
        return dict(columns)
    fetched = fetch([cast(RemoteRef, block.columns).ref for block in missing.values()])
    local = {key: ColumnBlock(value) for key, value in zip(missing, fetched, strict=True)}
    return {name: _with_blocks(column, local) for name, column in columns.items()}


def to_remote(column: TokenColumn, put: Callable[[Columns], Any]) -> TokenColumn:
    """The column with references instead of local blocks; `put` stores a block and returns its reference."""
    return TokenColumn(
        tuple(block_to_remote(block, put) for block in column.blocks), column.block_index, column.starts, column.key
    )


def block_to_remote(block: ColumnBlock, put: Callable[[Columns], Any]) -> ColumnBlock:
    return block if isinstance(block.columns, RemoteRef) else ColumnBlock(RemoteRef(put(block.columns)))


def blocks_of(columns: Iterable[TokenColumn]) -> list[ColumnBlock]:
    """Every block of the columns once."""
    return list({id(block): block for column in columns for block in column.blocks}.values())


def _is_remote(block: ColumnBlock) -> bool:
    return isinstance(block.columns, RemoteRef)


def _with_blocks(column: TokenColumn, local: Mapping[int, ColumnBlock]) -> TokenColumn:
    blocks = tuple(local.get(id(block), block) for block in column.blocks)
    return TokenColumn(blocks, column.block_index, column.starts, column.key)
