"""The batch: many samples, ragged, as flat NumPy columns plus offsets. Nothing is padded.

What always holds: a sample column has one value a sample, a token column one value a token, and sample i owns the tokens
`offsets[i]:offsets[i + 1]` of every token column. A batch is never changed: each operation returns a new one.

Example: samples of 3 and 2 tokens have `offsets = [0, 3, 5]`; `select([1])` keeps the last two values of each token
column; `concat` of the pieces of a `split` holds every sample once, in the order of the pieces.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll.data.sample import Sample
from roll.data.tokenlog import BoolArray, FloatArray, IntArray

Array = NDArray[Any]
Indices = NDArray[np.int64]

SAMPLE_COLUMNS: Mapping[str, Any] = {
    "sample": np.str_,
    "task": np.str_,
    "domain": np.str_,
    "group": np.int64,
    "reward": np.float64,
    "temperature": np.float32,
    "advantage": np.float32,
}
"""Columns with one value a sample, and their types."""

TOKEN_COLUMNS: Mapping[str, Any] = {
    "ids": np.int32,
    "loss_mask": np.bool_,
    "behaviour": np.float32,
    "versions": np.int32,
    "proximal": np.float32,
    "ref": np.float32,
}
"""Columns with one value a token, and their types. The three log-probs are under softmax(logits / temperature)."""


@dataclass(frozen=True)
class Batch:
    offsets: Indices
    columns: Mapping[str, Array]

    def __post_init__(self) -> None:
        for name, values in self.columns.items():
            expected = len(self) if _is_sample_column(name) else self.tokens
            if values.shape != (expected,):
                raise ValueError(f"column {name!r} has shape {values.shape}, expected ({expected},)")

    @classmethod
    def from_samples(cls, samples: Sequence[Sample]) -> Batch:
        lengths = [len(sample.log) for sample in samples]
        columns: dict[str, Array] = {
            "sample": np.array([s.id for s in samples], np.str_),
            "task": np.array([s.task.id for s in samples], np.str_),
            "domain": np.array([s.task.domain for s in samples], np.str_),
            "group": np.array([s.group for s in samples], np.int64),
            "reward": np.array([s.reward for s in samples], np.float64),
            "temperature": np.array([s.temperature for s in samples], np.float32),
        }
        for name in ("ids", "loss_mask", "behaviour", "versions"):
            parts = [getattr(sample.log, name) for sample in samples]
            columns[name] = np.concatenate(parts) if parts else np.zeros(0, TOKEN_COLUMNS[name])
        return cls(_offsets(lengths), columns)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Array:
        if name not in self.columns:
            raise KeyError(f"the batch has no column {name!r}: it has {', '.join(self.columns)}")
        return self.columns[name]

    @property
    def tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def lengths(self) -> Indices:
        return np.diff(self.offsets)

    @property
    def ids(self) -> IntArray:
        return self["ids"]

    @property
    def loss_mask(self) -> BoolArray:
        return self["loss_mask"]

    @property
    def behaviour(self) -> FloatArray:
        return self["behaviour"]

    def rows(self, name: str) -> list[Array]:
        """A token column as one view a sample."""
        return [self[name][a:b] for a, b in zip(self.offsets[:-1], self.offsets[1:], strict=True)]

    def sum_tokens(self, values: Array) -> Array:
        """Sums a per-token array within each sample. Works for samples without tokens too."""
        ends = np.concatenate([[0], np.cumsum(values, dtype=np.float64)])
        return np.asarray(ends[self.offsets[1:]] - ends[self.offsets[:-1]])

    def with_columns(self, **columns: Array) -> Batch:
        """The same samples with columns added or replaced; a column's name says whether it is per sample or token."""
        cast = {name: np.asarray(values, dtype=_dtype(name)) for name, values in columns.items()}
        return Batch(self.offsets, {**self.columns, **cast})

    def select(self, indices: Sequence[int] | Indices) -> Batch:
        """The samples at `indices`, in that order."""
        chosen = np.asarray(indices, dtype=np.int64)
        tokens = self.token_indices(chosen)
        columns = {n: v[chosen] if _is_sample_column(n) else v[tokens] for n, v in self.columns.items()}
        return Batch(_offsets(self.lengths[chosen]), columns)

    def token_indices(self, indices: Indices) -> Indices:
        """Where the tokens of the samples at `indices` lie in a token column, in that order."""
        parts = [np.arange(self.offsets[i], self.offsets[i + 1]) for i in indices]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        if not batches:
            raise ValueError("concat needs at least one batch")
        names = list(batches[0].columns)
        for other in batches[1:]:
            if set(other.columns) != set(names):
                differing = sorted(set(other.columns) ^ set(names))
                raise ValueError(f"the batches differ in their columns: {', '.join(differing)}")
        columns = {name: np.concatenate([batch[name] for batch in batches]) for name in names}
        return Batch(_offsets(np.concatenate([batch.lengths for batch in batches])), columns)

    def split(self, parts: int) -> list[Indices]:
        """Indices of `parts` pieces with balanced token counts; every sample is in exactly one, in ascending order."""
        return balanced_split(self.lengths, parts)


def balanced_split(lengths: Sequence[int] | Indices, parts: int) -> list[Indices]:
    """Assigns items to `parts` bins, longest first, each to the lightest bin. Ties go by index: the result is fixed."""
    if parts < 1:
        raise ValueError(f"cannot split into {parts} parts")
    bins: list[tuple[int, int]] = [(0, part) for part in range(parts)]
    members: list[list[int]] = [[] for _ in range(parts)]
    for item in sorted(range(len(lengths)), key=lambda i: (-int(lengths[i]), i)):
        load, part = heapq.heappop(bins)
        members[part].append(item)
        heapq.heappush(bins, (load + int(lengths[item]), part))
    return [np.array(sorted(m), dtype=np.int64) for m in members]


def _offsets(lengths: Sequence[int] | Indices) -> Indices:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def _is_sample_column(name: str) -> bool:
    _dtype(name)
    return name in SAMPLE_COLUMNS


def _dtype(name: str) -> Any:
    if name in SAMPLE_COLUMNS:
        return SAMPLE_COLUMNS[name]
    if name in TOKEN_COLUMNS:
        return TOKEN_COLUMNS[name]
    raise KeyError(f"unknown column {name!r}: known are {', '.join([*SAMPLE_COLUMNS, *TOKEN_COLUMNS])}")
