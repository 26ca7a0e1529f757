"""Packing: sequences into rows of tokens without padding, every shared prefix once.

Sequences that begin alike (siblings share their prompt, prompts share their system message, short answers are often the
same) form a tree; each node of it is computed once and used by all sequences through it. A token's hidden state depends
on its ancestors alone, so outputs and gradients are those of separate sequences.

Example: `[1 2 3]`, `[1 2 4]` and `[1 2]` pack into the rows `1 2 3 4`; their paths are `[0 1 2]`, `[0 1 3]` and `[0 1]`;
row 3 (the token 4) attends to rows 0, 1 and 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roll.data.columns import Indices
from roll.data.tokenlog import IntArray, common_prefix


@dataclass(frozen=True)
class PrefixTree:
    """Rows of tokens; `paths[i][t]` is the row of token t of sequence i, and `new[i]` how many of its tokens no earlier
    sequence has, which are the rows at the end of its path."""

    ids: IntArray
    positions: IntArray
    paths: list[Indices]
    new: list[int]

    @property
    def rows(self) -> int:
        return len(self.ids)


def pack(sequences: Sequence[IntArray], share: bool = True) -> PrefixTree:
    """The prefix tree of the sequences. Sorted, each shares its longest prefix with the one before it.

    Without `share` every sequence is a tree of its own.
    """
    order = sorted_order(sequences)
    paths: list[Indices] = [np.zeros(0, np.int64)] * len(sequences)
    new = [0] * len(sequences)
    ids: list[IntArray] = []
    positions: list[IntArray] = []
    rows = 0
    before: IntArray = np.zeros(0, np.int32)
    path: Indices = np.zeros(0, np.int64)
    for index in order:
        sequence = sequences[index]
        shared = common_prefix(before, sequence) if share else 0
        fresh = len(sequence) - shared
        path = np.concatenate([path[:shared], np.arange(rows, rows + fresh)])
        paths[index], new[index] = path, fresh
        ids.append(sequence[shared:])
        positions.append(np.arange(shared, len(sequence), dtype=np.int32))
        rows += fresh
        before = sequence
    return PrefixTree(_concat(ids), _concat(positions), paths, new)


def cut(sequences: Sequence[IntArray], limit_rows: int, share: bool = True) -> list[Indices]:
    """Cuts sequences, in sorted order, into runs whose trees have at most `limit_rows` rows (or one sequence)."""
    pieces: list[list[int]] = []
    rows = 0
    before: IntArray = np.zeros(0, np.int32)
    for index in sorted_order(sequences):
        sequence = sequences[index]
        fresh = len(sequence) - (common_prefix(before, sequence) if share else 0)
        if pieces and rows + fresh <= limit_rows:
            pieces[-1].append(index)
            rows += fresh
        else:
            pieces.append([index])
            rows = len(sequence)
        before = sequence
    return [np.array(piece, np.int64) for piece in pieces]


def sorted_order(sequences: Sequence[IntArray]) -> list[int]:
    """Lexicographic order of token ids; equal sequences in the order given."""
    keys = [sequence.astype(">i4").tobytes() for sequence in sequences]
    return sorted(range(len(sequences)), key=lambda i: (keys[i], i))


def _concat(parts: list[IntArray]) -> IntArray:
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)
