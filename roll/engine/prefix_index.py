"""Finds the cached sequence that has the longest common prefix with a prompt, in time that hardly depends on how many are
cached.

Sequences are kept in the sorted order of their tokens' bytes. In that order, whatever lies between a sequence and a query
shares at least as many first tokens with the query as that sequence does. So one of the two neighbours of the query's
place shares the most.

Example: of [5 6], [5 6 7 8] and [5 9], the query [5 6 7 1] has its place between the first two, shares 2 tokens with the
one and 3 with the other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice
from typing import Generic, TypeVar

import numpy as np

from roll.data.tokenlog import IntArray, common_prefix

D = TypeVar("D")

Key = bytes
"""The tokens of a sequence as bytes."""
TOKEN_BYTES = 4


def key_of(tokens: IntArray) -> Key:
    """The key of a sequence; the first `n * TOKEN_BYTES` bytes are the key of its first n tokens."""
    return np.ascontiguousarray(tokens, np.int32).tobytes()


class PrefixIndex(Generic[D]):
    """The tokens of donors, whose keys and values a sequence with the same first tokens can reuse."""

    def __init__(self) -> None:
        self._sorted: list[Key] = []
        self._donors: dict[Key, dict[D, None]] = {}

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, key: Key, donor: D) -> None:
        donors = self._donors.get(key)
        if donors is None:
            donors = self._donors[key] = {}
            self._sorted.insert(bisect_left(self._sorted, key), key)
        donors[donor] = None

    def remove(self, key: Key, donor: D) -> None:
        donors = self._donors[key]
        del donors[donor]
        if not donors:
            del self._donors[key]
            del self._sorted[bisect_left(self._sorted, key)]

    def clear(self) -> None:
        self._sorted.clear()
        self._donors.clear()

    def longest(self, query: Key) -> tuple[D | None, int]:
        """A donor with the longest common prefix, and its length in tokens. Among several, one whose tokens are all
        shared."""
        place = bisect_left(self._sorted, query)
        best, shared = b"", 0
        for key in self._sorted[max(place - 1, 0) : place + 1]:
            same = _common_tokens(key, query)
            if same > shared:
                best, shared = key, same
        if not shared:
            return None, 0
        donors = self._donors.get(query[: shared * TOKEN_BYTES]) or self._donors[best]
        return next(iter(donors)), shared

    def beginning_with(self, query: Key) -> Iterator[D]:
        """The donors whose tokens begin with all tokens of the query."""
        for key in islice(self._sorted, bisect_left(self._sorted, query), None):
            if not key.startswith(query):
                return
            yield from self._donors[key]


def _common_tokens(a: Key, b: Key) -> int:
    if b.startswith(a):
        return len(a) // TOKEN_BYTES
    return common_prefix(np.frombuffer(a, np.int32), np.frombuffer(b, np.int32))
