"""The blocks of a paged cache: who uses them, and which hold a beginning that others may go on from.

A block has a key once its keys and values are computed, or are about to be by a pass that is already launched. A key is
made from the version of the weights and all tokens up to the block's end, so equal keys mean equal contents.

What always holds: every block is either used (by one sequence or several) or spare; a spare block with a key keeps its
contents until it is given away, the one that became spare first going first; block 0 is nobody's (padding writes there).

Example, blocks of 2: A = [5 6 7 8 9] is computed, its first two blocks get the keys of [5 6] and [5 6 7 8]. Then
B = [5 6 7 8 1] finds both and computes only its last token, in a block of its own. A leaves: its third block has no key
and is given away first; the other two are still B's.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np

from roll.data.tokenlog import IntArray

Key = bytes


def keys_of(tokens: IntArray, size: int, version: int, known: Sequence[Key] = ()) -> list[Key]:
    """The keys of all full blocks of the tokens; `known` are those of the first ones."""
    keys = list(known)
    data = np.ascontiguousarray(tokens, np.int64)
    parent = keys[-1] if keys else version.to_bytes(8, "little", signed=True)
    for block in range(len(keys), len(data) // size):
        parent = hashlib.blake2b(parent + data[block * size : (block + 1) * size].tobytes(), digest_size=16).digest()
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
        self._blank: deque[int] = deque(range(1, count))
        """Spare blocks without a key."""
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Spare blocks with a key, the longest spare first."""

    @property
    def tokens(self) -> int:
        """What they hold."""
        return (self.count - 1) * self._size

    def grow(self, count: int) -> None:
        """There are so many blocks now; those that were here are what they were."""
        more = range(self.count, count)
        self._users += [0] * len(more)
        self._key_of += [None] * len(more)
        self._blank.extend(more)
        self.count = count

    @property
    def spare(self) -> int:
        return len(self._blank) + len(self._kept)

    @property
    def used(self) -> int:
        return self.count - 1 - self.spare

    def find(self, keys: Sequence[Key]) -> list[int]:
        """The blocks of the longest beginning that is here."""
        found: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def use(self, blocks: Sequence[int]) -> None:
        """One more sequence uses each of these."""
        for block in blocks:
            self._kept.pop(block, None)
            self._users[block] += 1

    def spare_among(self, blocks: Sequence[int]) -> int:
        """How many of these nobody uses: using them leaves so many fewer spare."""
        return sum(self._users[block] == 0 for block in blocks)

    def take(self, count: int) -> list[int]:
        """Blocks for new contents; there must be as many spare."""
        assert count <= self.spare, "the caller looks first"
        taken: list[int] = []
        for _ in range(count):
            if self._blank:
                block = self._blank.popleft()
            else:
                block, _ = self._kept.popitem(last=False)
                self._forget(block)
            self._users[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """One sequence no longer uses these. Of a sequence's blocks the last become spare first: a beginning is worth
        more than what follows it."""
        for block in reversed(blocks):
            assert self._users[block] > 0, f"block {block} is nobody's"
            self._users[block] -= 1
            if self._users[block] == 0:
                if self._key_of[block] is None:
                    self._blank.append(block)
                else:
                    self._kept[block] = None

    def name(self, block: int, key: Key) -> None:
        """The block's contents are those of the key. Where another block has it already, that one is found."""
        assert self._users[block] > 0, "only a used block has contents to name"
        if key not in self._block_of and self._key_of[block] is None:
            self._key_of[block] = key
            self._block_of[key] = block

    def forget_all(self) -> None:
        """The weights have changed: nothing here is a beginning for others any more."""
        self._block_of.clear()
        self._key_of = [None] * self.count
        self._blank.extend(self._kept)
        self._kept.clear()

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        assert key is not None
        self._key_of[block] = None
        del self._block_of[key]
