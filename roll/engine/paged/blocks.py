"""The block pool of the paged KV cache: which blocks are in use, and which hold a prefix that other sequences can share.

A block gets a key once its keys and values are computed, or will be by a pass that is already launched. The key is a hash
of the version of the weights and all tokens up to the block's end, so equal keys mean equal contents.

Invariants: every block is either used (by one or several sequences) or spare. A spare block with a key keeps its contents
until it is reallocated, in LRU order. Block 0 belongs to no sequence (padding rows write to it).

Example with blocks of 2: A = [5 6 7 8 9] is computed; its first two blocks get the keys of [5 6] and [5 6 7 8]. B = [5 6
7 8 1] finds both and computes only its last token, in a block of its own. When A leaves, its third block has no key and
is reallocated first; B still uses the other two.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import repeat

import numpy as np

from roll.data.tokenlog import IntArray

Key = bytes

_NO_BLOCK = 0
"""The block that belongs to no sequence."""


def keys_of(tokens: IntArray, size: int, version: int, known: Sequence[Key] = ()) -> list[Key]:
    """The keys of all full blocks of the tokens; `known` are the keys of the first blocks, if already computed."""
    keys = list(known)
    fresh = tokens[len(keys) * size : len(tokens) // size * size]
    data, block_bytes = np.ascontiguousarray(fresh, np.int64).tobytes(), 8 * size
    parent = keys[-1] if keys else version.to_bytes(8, "little", signed=True)
    for start in range(0, len(data), block_bytes):
        parent = hashlib.blake2b(parent + data[start : start + block_bytes], digest_size=16).digest()
        keys.append(parent)
    return keys


class BlockPool:
    def __init__(self, count: int, size: int) -> None:
        """`count` blocks of `size` positions each."""
        if count < 2:
            raise ValueError(f"a cache of {count} blocks holds nothing: the first one is set aside")
        self.count = count
        self._size = size
        self._users = [0] * count
        self._key_of: list[Key | None] = [None] * count
        self._block_of: dict[Key, int] = {}
        self._empty: deque[int] = deque(range(1, count))
        """Spare blocks without a key."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Spare blocks with a key, least recently used first."""

    @property
    def tokens(self) -> int:
        """Capacity in tokens."""
        return (self.count - 1) * self._size

    def grow(self, count: int) -> None:
        """Grows the pool to `count` blocks. Existing blocks keep their state."""
        more = range(self.count, count)
        self._users += [0] * len(more)
        self._key_of += [None] * len(more)
        self._empty.extend(more)
        self.count = count

    @property
    def spare(self) -> int:
        return len(self._empty) + len(self._cached)

    @property
    def used(self) -> int:
        return self.count - 1 - self.spare

    def find(self, keys: Sequence[Key]) -> list[int]:
        """The blocks of the longest cached prefix of these keys."""
        found = list(map(self._block_of.get, keys, repeat(_NO_BLOCK)))
        return found[: found.index(_NO_BLOCK)] if _NO_BLOCK in found else found

    def use(self, blocks: Sequence[int]) -> None:
        """Adds one user to each of these blocks."""
        users, cached = self._users, self._cached
        for block in blocks:
            if not users[block]:
                cached.pop(block, None)
            users[block] += 1

    def spare_among(self, blocks: Sequence[int]) -> int:
        """How many of these blocks no sequence uses: using them reduces the spare blocks by that number."""
        return list(map(self._users.__getitem__, blocks)).count(0)

    def take(self, count: int) -> list[int]:
        """Allocates blocks for new contents; at least `count` must be spare."""
        assert count <= self.spare, "the caller looks first"
        taken: list[int] = []
        for _ in range(count):
            if self._empty:
                block = self._empty.popleft()
            else:
                block, _ = self._cached.popitem(last=False)
                self._evict(block)
            self._users[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Removes one user from each of these blocks. The last blocks of a sequence become spare first, because a shorter
        prefix is more likely to be shared."""
        users, key_of, cached = self._users, self._key_of, self._cached
        for block in reversed(blocks):
            count = users[block] - 1
            assert count >= 0, f"block {block} has no user"
            users[block] = count
            if not count:
                if key_of[block] is None:
                    self._empty.append(block)
                else:
                    cached[block] = None

    def register(self, block: int, key: Key) -> None:
        """Registers the block's contents under the key. If another block has the key already, `find` continues to return
        that one."""
        assert self._users[block] > 0, "only a used block has contents to name"
        if key not in self._block_of and self._key_of[block] is None:
            self._key_of[block] = key
            self._block_of[key] = block

    def evict_all(self) -> None:
        """Drops all keys after a weight update: no block can be shared any more."""
        self._block_of.clear()
        self._key_of = [None] * self.count
        self._empty.extend(self._cached)
        self._cached.clear()

    def _evict(self, block: int) -> None:
        key = self._key_of[block]
        assert key is not None
        self._key_of[block] = None
        del self._block_of[key]
