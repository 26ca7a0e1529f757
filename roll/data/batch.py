"""The batch: many samples, ragged, as flat NumPy columns plus offsets. Nothing is padded.

Invariants: a column's name determines its kind. A sample column has one value per sample and is in this process. A token
column has one value per token; sample i owns `offsets[i]:offsets[i + 1]` of it; it may be in blocks that other processes
hold (`remote_columns.py`). A turn column has one value per response; sample i owns `turn_offsets[i]:turn_offsets[i + 1]`
of it; it is in this process; only batches with environment episodes have any. A batch is immutable: each operation
returns a new one.

Example: samples of 3 and 2 tokens, in 1 and 2 turns, have `offsets = [0, 3, 5]` and `turn_offsets = [0, 1, 3]`;
`select([1])` keeps the last two values of each token and each turn column; `concat` of the pieces of a `split` has every
sample once, in the order of the pieces.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from roll.data.remote_columns import Array, ColumnBlock, Fetch, Indices, TokenColumn, blocks_of, resolve
from roll.data.routes import NO_ROUTES, to_common_width
from roll.data.sample import Sample
from roll.data.tokenlog import BoolArray, FloatArray, IntArray

SAMPLE_COLUMNS: Mapping[str, Any] = {
    "sample": np.str_,
    "task": np.str_,
    "domain": np.str_,
    "group": np.int64,
    "reward": np.float64,
    "temperature": np.float32,
    "truncated": np.bool_,
    "turns": np.int64,
    "baseline": np.float64,
    "kl": np.float64,
    "advantage": np.float32,
    "response_tokens": np.int64,
}
"""Columns with one value per sample, and their types. `truncated`: its last response was cut off at the token limit;
`baseline`: the reward of its task's greedy answer; `kl`: its divergence from the reference, summed over tokens."""

TURN_COLUMNS: Mapping[str, Any] = {
    "turn_reward": np.float64,
    "turn_state": np.int64,
    "turn_advantage": np.float32,
}
"""Columns with one value per turn, `turns` of them per sample, and their types. Turns of a group that began in the same
state have the same `turn_state`."""

TOKEN_COLUMNS: Mapping[str, Any] = {
    "ids": np.int32,
    "loss_mask": np.bool_,
    "behaviour": np.float32,
    "versions": np.int32,
    "turn": np.int32,
    "proximal": np.float32,
    "ref": np.float32,
    "values": np.float32,
    "returns": np.float32,
    "advantages": np.float32,
    "routes": np.uint8,
}
"""Columns with one value per token, and their types. The log-probs are under softmax(logits / temperature); `turn` is the
index of the sample's response that the token belongs to, below 0 if it was not sampled (-2 if it begins a branch, see
`tokenlog.py`); `values` are a critic's predictions, `returns` its targets; `routes` have one row per token, of a type of
their own (`routes.py`)."""

_TYPES = {**SAMPLE_COLUMNS, **TURN_COLUMNS, **TOKEN_COLUMNS}

LOG_COLUMNS = ("ids", "loss_mask", "behaviour", "versions", "turn", "routes")
"""The token columns that a token log has."""

Column = Array | TokenColumn


@dataclass(frozen=True)
class Batch:
    """Many samples, ragged: columns with a value per sample, per turn or per token. `offsets[i]` is the position of
    sample i's first token; the last offset is the number of tokens."""

    offsets: Indices
    columns: Mapping[str, Column]
    """Sample and turn columns are arrays; token columns are `TokenColumn`s, even if an array was given."""

    def __post_init__(self) -> None:
        columns: dict[str, Column] = {}
        for name, values in self.columns.items():
            expected = self._size(name)
            if isinstance(values, TokenColumn):
                if name not in TOKEN_COLUMNS or len(values.block_index) != len(self):
                    raise ValueError(
                        f"column {name!r} has {len(values.block_index)} samples' tokens, expected {len(self)}"
                    )
            elif values.shape[:1] != (expected,) or values.ndim != (2 if name == "routes" else 1):
                expected_shape = f"({expected}, width)" if name == "routes" else f"({expected},)"
                raise ValueError(f"column {name!r} has shape {values.shape}, expected {expected_shape}")
            elif name in TOKEN_COLUMNS:
                values = TokenColumn.flat(values, self.offsets)
            columns[name] = values
        object.__setattr__(self, "columns", columns)

    def _size(self, name: str) -> int:
        _dtype(name)
        if name in TURN_COLUMNS:
            return int(self.turn_offsets[-1])
        return len(self) if name in SAMPLE_COLUMNS else self.tokens

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles local token columns flat, without samples of their blocks that the batch does not have."""
        return Batch, (self.offsets, {n: self._compact(n, c) for n, c in self.columns.items()})

    def _compact(self, name: str, column: Column) -> Column:
        return self[name] if isinstance(column, TokenColumn) and column.is_local else column

    @classmethod
    def from_samples(cls, samples: Sequence[Sample]) -> Batch:
        """The batch of samples whose token logs are in this process."""
        block = token_block(samples)
        lengths = [len(sample.log) for sample in samples]
        return cls.from_blocks(samples, lengths, [block], np.zeros(len(samples), np.int64), _offsets(lengths)[:-1])

    @classmethod
    def from_blocks(
        cls,
        samples: Sequence[Sample],
        lengths: Sequence[int] | Indices,
        blocks: Sequence[ColumnBlock],
        block_index: Indices,
        starts: Indices,
    ) -> Batch:
        """A batch of samples whose token logs are in blocks: `lengths` tokens from `starts` on of the block at
        `block_index`."""
        columns: dict[str, Column] = {
            "sample": np.array([s.id for s in samples], np.str_),
            "task": np.array([s.task.id for s in samples], np.str_),
            "domain": np.array([s.task.domain for s in samples], np.str_),
            "group": np.array([s.group for s in samples], np.int64),
            "reward": np.array([s.reward for s in samples], np.float64),
            "temperature": np.array([s.temperature for s in samples], np.float32),
            "response_tokens": np.array([s.response_tokens for s in samples], np.int64),
            "truncated": np.array([s.finish == "length" for s in samples], np.bool_),
            "turns": np.array([s.turns for s in samples], np.int64),
            **_turn_columns(samples),
        }
        for name in LOG_COLUMNS:
            columns[name] = TokenColumn(tuple(blocks), block_index, starts, name)
        return cls(_offsets(lengths), columns)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Array:
        """A column as one array. A token column in several pieces is copied into one; `rows` copies nothing."""
        column = self._column(name)
        return column.gather(self.lengths, _empty_column(name)) if isinstance(column, TokenColumn) else column

    def _column(self, name: str) -> Column:
        if name not in self.columns:
            raise KeyError(f"the batch has no column {name!r}: it has {', '.join(self.columns)}")
        return self.columns[name]

    @property
    def tokens(self) -> int:
        """Number of tokens of all samples."""
        return int(self.offsets[-1])

    @property
    def lengths(self) -> Indices:
        """Number of tokens of each sample."""
        return np.diff(self.offsets)

    @property
    def turn_offsets(self) -> Indices:
        """The position of each sample's first turn, and at the end the number of turns."""
        return _offsets(self["turns"])

    @property
    def ids(self) -> IntArray:
        """Token ids, `[tokens]`."""
        return self["ids"]

    @property
    def loss_mask(self) -> BoolArray:
        """Whether each token is trained on, `[tokens]`."""
        return self["loss_mask"]

    @property
    def behaviour(self) -> FloatArray:
        """Log-probabilities of the sampler, `[tokens]`; 0 if a token was not sampled."""
        return self["behaviour"]

    def rows(self, name: str) -> list[Array]:
        """A token or turn column as one view per sample."""
        column = self._column(name)
        if isinstance(column, TokenColumn):
            return column.rows(self.lengths)
        assert name in TURN_COLUMNS, f"{name!r} has one value per sample"
        return [column[begin:end] for begin, end in pairwise(self.turn_offsets)]

    def sum_tokens(self, values: Array) -> Array:
        """Sums a per-token array within each sample. Works for samples without tokens too."""
        ends = np.concatenate([[0], np.cumsum(values, dtype=np.float64)])
        return np.asarray(ends[self.offsets[1:]] - ends[self.offsets[:-1]])

    def with_columns(self, **columns: Column) -> Batch:
        """The same samples with columns added or replaced; a column's name determines its kind."""
        cast = {
            name: values if isinstance(values, TokenColumn) else np.asarray(values, dtype=_cast_dtype(name))
            for name, values in columns.items()
        }
        return Batch(self.offsets, {**self.columns, **cast})

    def select(self, indices: Sequence[int] | Indices) -> Batch:
        """The samples at `indices`, in that order. Token values are not copied."""
        chosen = np.asarray(indices, dtype=np.int64)
        if len(chosen) and (chosen.min() < 0 or chosen.max() >= len(self)):
            raise IndexError(f"samples {chosen.min()} to {chosen.max()} were requested, but the batch has {len(self)}")
        return Batch(
            _offsets(self.lengths[chosen]), {n: self._select_column(n, c, chosen) for n, c in self.columns.items()}
        )

    def _select_column(self, name: str, column: Column, samples: Indices) -> Column:
        if isinstance(column, TokenColumn):
            return column.select(samples)
        return column[_span_positions(self.turn_offsets, samples) if name in TURN_COLUMNS else samples]

    def token_indices(self, indices: Indices) -> Indices:
        """The positions of the tokens of the samples at `indices` in a flat token column, in that order."""
        return _span_positions(self.offsets, indices)

    def resolved(self, fetch: Fetch) -> Batch:
        """The batch with all its tokens in this process."""
        tokens = {name: column for name, column in self.columns.items() if isinstance(column, TokenColumn)}
        return Batch(self.offsets, {**self.columns, **resolve(tokens, fetch)})

    @property
    def blocks(self) -> list[ColumnBlock]:
        """Every block of its token columns once."""
        return blocks_of(column for column in self.columns.values() if isinstance(column, TokenColumn))

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """One batch of the samples of several, in their order."""
        if not batches:
            raise ValueError("concat needs at least one batch")
        names = list(batches[0].columns)
        for other in batches[1:]:
            if set(other.columns) != set(names):
                differing = sorted(set(other.columns) ^ set(names))
                raise ValueError(f"the batches differ in their columns: {', '.join(differing)}")
        ends = np.cumsum([len(batch) for batch in batches])
        parts = [np.arange(end - len(batch), end) for end, batch in zip(ends, batches, strict=True)]
        columns = {name: _concat_columns([batch.columns[name] for batch in batches], parts) for name in names}
        return Batch(_offsets(np.concatenate([batch.lengths for batch in batches])), columns)

    def split(self, parts: int) -> list[Indices]:
        """Indices of `parts` pieces with balanced token counts; every sample is in exactly one, in ascending order."""
        return balanced_split(self.lengths, parts)


def balanced_split(lengths: Sequence[int] | Indices, parts: int) -> list[Indices]:
    """Assigns items to `parts` bins, longest first, each to the lightest bin. Ties go by index: the result is
    deterministic."""
    if parts < 1:
        raise ValueError(f"cannot split into {parts} parts")
    bins: list[tuple[int, int]] = [(0, part) for part in range(parts)]
    members: list[list[int]] = [[] for _ in range(parts)]
    for item in sorted(range(len(lengths)), key=lambda i: (-int(lengths[i]), i)):
        load, part = heapq.heappop(bins)
        members[part].append(item)
        heapq.heappush(bins, (load + int(lengths[item]), part))
    return [np.array(sorted(m), dtype=np.int64) for m in members]


def token_block(samples: Sequence[Sample], mask_below: int = 0) -> ColumnBlock:
    """The token logs of samples, concatenated; tokens of versions before `mask_below` are masked."""
    columns: dict[str, Array] = {}
    for name in LOG_COLUMNS:
        parts = [getattr(sample.log, name) for sample in samples]
        columns[name] = (
            np.concatenate(to_common_width(parts) if name == "routes" else parts) if parts else _empty_column(name)
        )
    if mask_below > 0:
        columns["loss_mask"] = columns["loss_mask"] & (columns["versions"] >= mask_below)
    return ColumnBlock(columns)


def _turn_columns(samples: Sequence[Sample]) -> dict[str, Column]:
    """The turn columns of environment episodes; empty if there are none. Among episodes, a graded answer counts as an
    episode of one turn: it earns the sample's reward, in the state that all answers to its task begin in."""
    if not any(sample.turn_rewards for sample in samples):
        return {}
    rewards = [sample.turn_rewards or [sample.reward] for sample in samples]
    states = [sample.turn_states or [0] for sample in samples]
    return {
        "turn_reward": np.array([reward for turns in rewards for reward in turns], np.float64),
        "turn_state": np.array([state for turns in states for state in turns], np.int64),
    }


def _concat_columns(columns: Sequence[Column], parts: Sequence[Indices]) -> Column:
    tokens = [column for column in columns if isinstance(column, TokenColumn)]
    if tokens:
        return TokenColumn.concat(tokens, parts)
    return np.concatenate([column for column in columns if not isinstance(column, TokenColumn)])


def _offsets(lengths: Sequence[int] | Indices) -> Indices:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def _span_positions(offsets: Indices, indices: Indices) -> Indices:
    """The positions from `offsets[i]` to `offsets[i + 1]`, for each i of the indices."""
    parts = [np.arange(offsets[i], offsets[i + 1]) for i in indices]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _empty_column(name: str) -> Array:
    """A column of no values."""
    return NO_ROUTES if name == "routes" else np.zeros(0, _dtype(name))


def _cast_dtype(name: str) -> Any:
    """The type that a column's values are converted to; None if they keep their type."""
    return None if name == "routes" else _dtype(name)


def _dtype(name: str) -> Any:
    if name not in _TYPES:
        raise KeyError(f"unknown column {name!r}: known are {', '.join(_TYPES)}")
    return _TYPES[name]
