"""Packs sequences into tokens without padding, with every shared prefix stored once.

Sequences with a common prefix (the samples of a group share their prompt, prompts share their system message, short
answers are often equal) form a tree; each node is computed once and used by all sequences through it. A token's hidden
state depends only on its ancestors, so outputs and gradients are those of separate sequences.

Example: `[1 2 3]`, `[1 2 4]` and `[1 2]` pack into the tokens `1 2 3 4`; their paths are `[0 1 2]`, `[0 1 3]` and `[0
1]`; packed token 3 (the token 4) attends to packed tokens 0, 1 and 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from roll.data.remote_columns import Indices
from roll.data.tokenlog import IntArray


@dataclass(frozen=True)
class PrefixTree:
    """Packed tokens. `paths[i][t]` is the index of the packed token for token t of sequence i. `new[i]` is how many of
    its tokens no earlier sequence has; they are at the end of its path."""

    ids: IntArray
    positions: IntArray
    paths: list[Indices]
    new: list[int]

    @property
    def rows(self) -> int:
        return len(self.ids)


def pack(sequences: Sequence[IntArray], share: bool = True) -> PrefixTree:
    """The prefix tree of the sequences. In sorted order, each shares its longest prefix with the previous one.

    Without `share` every sequence is a tree of its own.
    """
    order = sorted_order(sequences)
    paths: list[Indices] = [np.zeros(0, np.int64)] * len(sequences)
    new = [0] * len(sequences)
    ids: list[IntArray] = []
    positions: list[Indices] = []
    rows = 0
    path: Indices = np.zeros(0, np.int64)
    numbers = np.arange(sum(map(len, sequences)))
    for index, shared in zip(order, _shared(sequences, order, share), strict=True):
        sequence = sequences[index]
        fresh = len(sequence) - shared
        path = np.concatenate([path[:shared], numbers[rows : rows + fresh]])
        paths[index], new[index] = path, fresh
        ids.append(sequence[shared:])
        positions.append(numbers[shared : len(sequence)])
        rows += fresh
    return PrefixTree(_concat(ids), np.concatenate([*positions, numbers[:0]]).astype(np.int32), paths, new)


def cut(sequences: Sequence[IntArray], limit_rows: int, share: bool = True) -> list[Indices]:
    """Splits sequences, in sorted order, into runs whose trees have at most `limit_rows` packed tokens (or a single
    sequence). There are no more runs than necessary, and they are about equally large, because a small last run costs
    nearly as much as a full one."""
    order = sorted_order(sequences)
    whole = [len(sequences[i]) for i in order]
    fresh = [length - shared for length, shared in zip(whole, _shared(sequences, order, share), strict=True)]
    runs = _runs(fresh, whole, limit_rows)
    if len(runs) > 1:
        even = math.ceil(sum(fresh) / len(runs)) + max(whole)
        runs = min(_runs(fresh, whole, min(even, limit_rows)), runs, key=len)
    return [np.array([order[i] for i in run], np.int64) for run in runs]


def _shared(sequences: Sequence[IntArray], order: Sequence[int], share: bool) -> list[int]:
    """How many tokens each sequence, in this order, has in common with the one before it."""
    if not share or not order:
        return [0] * len(order)
    return [0, *common_prefixes([sequences[i] for i in order])]


def common_prefixes(sequences: Sequence[IntArray]) -> list[int]:
    """The lengths of the common prefixes of neighbouring sequences: one less than there are sequences. All neighbours are
    compared by one operation."""
    if len(sequences) < 2:
        return []
    lengths = np.array([len(sequence) for sequence in sequences])
    compared = np.minimum(lengths[:-1], lengths[1:])
    ends = np.cumsum(compared)
    before = np.concatenate([one[:count] for one, count in zip(sequences[:-1], compared, strict=True)])
    after = np.concatenate([other[:count] for other, count in zip(sequences[1:], compared, strict=True)])
    differing = np.append(np.flatnonzero(before != after), len(before))
    starts = ends - compared
    found: list[int] = np.minimum(differing[np.searchsorted(differing, starts)], ends).tolist()
    return [end - start for end, start in zip(found, starts.tolist(), strict=True)]


def _runs(fresh: list[int], whole: list[int], limit: int) -> list[range]:
    """Runs of neighbours. The first sequence of a run counts in full, the others without the prefix they share."""
    starts: list[int] = []
    rows = 0
    for i, new in enumerate(fresh):
        rows += new
        if not starts or rows > limit:
            starts.append(i)
            rows = whole[i]
    return [range(first, last) for first, last in pairwise([*starts, len(fresh)])]


def sorted_order(sequences: Sequence[IntArray]) -> list[int]:
    """Lexicographic order of token ids; equal sequences in the order given."""
    keys = [sequence.astype(">i4").tobytes() for sequence in sequences]
    return sorted(range(len(sequences)), key=lambda i: (keys[i], i))


def _concat(parts: list[IntArray]) -> IntArray:
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)
