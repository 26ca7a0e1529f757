"""Allocates the slots of the KV cache to running sequences and to reusable prefixes of finished ones.

Invariants: running sequences have slots 0 … n-1 without holes. A finished sequence stays cached in a free slot until the
slot is needed (least recently used first) or the weights change. So the next turn of a conversation, a resumed request or
a later sample of the same group finds its prefix. When the cache changes its shape, running sequences are copied, and
kept ones as far as there are slots.

Example with four slots: A, B, C run in 0, 1, 2. A ends and swaps slots with C, so that C, B run in 0, 1 and A is kept in
2. A's next turn takes over slot 2 without a copy and computes only its new tokens.
"""

from __future__ import annotations

from collections import OrderedDict

from roll.engine.cache import SlotCache
from roll.engine.kv_sizing import CacheShape
from roll.engine.prefix_index import TOKEN_BYTES, PrefixIndex, key_of
from roll.engine.shared_sequence import SharedSequence


class SlotAllocator:
    """With `tile` > 1, only prefixes whose length is a multiple of it are shared, and only those of prompts, because keys
    and values computed token by token have different bits than those computed in tiles."""

    def __init__(self, cache: SlotCache, tile: int = 1) -> None:
        self.running: list[SharedSequence] = []
        self._cache = cache
        self._tile = tile
        self._kept: OrderedDict[SharedSequence, None] = OrderedDict()
        """Finished sequences that other ones can reuse, least recently used first."""
        self._kept_at: dict[int, SharedSequence] = {}
        """The same by slot."""
        self._kept_index: PrefixIndex[SharedSequence] = PrefixIndex()
        self._running_index: dict[int, PrefixIndex[SharedSequence]] = {}
        """By version of the weights: the running sequences, by the tokens of their prompts that are computed."""

    def evict_all(self) -> None:
        """Drops all kept prefixes."""
        self._kept.clear()
        self._kept_at.clear()
        self._kept_index.clear()

    @property
    def cached_prefix_count(self) -> int:
        """Number of slots with kept prefixes."""
        return len(self._kept)

    def admit(self, fresh: list[SharedSequence], shape: CacheShape) -> int:
        """Gives new sequences slots after the running ones, in a cache of this shape, with kept prefixes reused. Returns
        the number of tokens shared."""
        donors = [self._reusable(self._kept_index, sequence) for sequence in fresh]
        for donor, _ in donors:
            if donor is not None:
                self._kept.move_to_end(donor)  # so that it is evicted last
        if shape != self._cache.shape:
            self._reshape(shape)
        return sum(self._assign_slot(sequence, *donor) for sequence, donor in zip(fresh, donors, strict=True))

    def computed(self, sequence: SharedSequence) -> None:
        """Lets other sequences find what is computed of a running sequence's prompt."""
        key = sequence.prompt_key[: TOKEN_BYTES * sequence.cached]
        if key != sequence.shared_key:
            self._hide(sequence)
            sequence.shared_key = key
            self._running_index.setdefault(sequence.version, PrefixIndex()).add(key, sequence)

    def _hide(self, sequence: SharedSequence) -> None:
        """Ends that other sequences find a running one."""
        if sequence.shared_key:
            index = self._running_index[sequence.version]
            index.remove(sequence.shared_key, sequence)
            if not len(index):
                del self._running_index[sequence.version]
            sequence.shared_key = b""

    def _reshape(self, shape: CacheShape) -> None:
        """Changes the cache's shape. Kept prefixes are dropped if there are too few slots or the slots are too short."""
        for prefix in [prefix for prefix in self._kept if prefix.cached > shape.positions]:
            self._drop(prefix)
        while len(self._kept) > shape.slots - len(self.running):
            self._drop(next(iter(self._kept)))
        sources = [(sequence.slot, sequence.cached) for sequence in (*self.running, *self._kept)]
        self._cache.reshape(shape, sources)
        self._kept_at.clear()
        for slot, prefix in enumerate(self._kept, len(self.running)):
            prefix.slot = slot
            self._kept_at[slot] = prefix

    def _assign_slot(self, sequence: SharedSequence, donor: SharedSequence | None, shared: int) -> int:
        sequence.slot = len(self.running)
        if donor is None or donor not in self._kept:
            self._free_slot(sequence.slot)
            shared = 0
        elif shared == donor.shared_tokens or len(self.running) + len(self._kept) == self._cache.shape.slots:
            self._move_prefix(donor, sequence.slot)
        else:
            self._free_slot(sequence.slot)
            self._cache.copy(donor.slot, sequence.slot, shared)
        if donor is not None:
            _begin(sequence, donor, shared)
        self._run(sequence)
        return shared

    def _run(self, sequence: SharedSequence) -> None:
        self.running.append(sequence)
        self.computed(sequence)

    def fork(self, slot: int, copied: SharedSequence) -> None:
        """Puts a copy of a running sequence into a slot of its own."""
        copied.slot = len(self.running)
        self._free_slot(copied.slot)
        self._cache.copy(slot, copied.slot, copied.cached)
        self._run(copied)

    def share(self, sequence: SharedSequence) -> int:
        """Copies the longest prefix that another running sequence of the same weights has. Returns the number of tokens
        gained."""
        index = self._running_index.get(sequence.version)
        donor, longest = self._reusable(index, sequence) if index is not None else (None, 0)
        if donor is None or longest <= sequence.cached:
            return 0
        gained = longest - sequence.cached
        self._cache.copy(donor.slot, sequence.slot, longest)
        _begin(sequence, donor, longest)
        self.computed(sequence)
        return gained

    def retire(self, sequence: SharedSequence, cache_prefix: bool) -> None:
        """Removes a sequence from the running ones. The last running one takes its slot, so that there is no hole."""
        self._hide(sequence)
        last = self.running.pop()
        if last is not sequence:
            self._cache.swap(sequence.slot, last.slot, sequence.cached, last.cached)
            self.running[sequence.slot] = last
            sequence.slot, last.slot = last.slot, sequence.slot
        tokens = sequence.prompt[: sequence.cached] if self._tile > 1 else sequence.cached_tokens
        if cache_prefix and len(tokens):
            sequence.shared_key = key_of(tokens)
            self._kept[sequence] = None
            self._kept_at[sequence.slot] = sequence
            self._kept_index.add(sequence.shared_key, sequence)

    def _drop(self, prefix: SharedSequence) -> None:
        """Forgets a kept prefix."""
        del self._kept[prefix]
        del self._kept_at[prefix.slot]
        self._kept_index.remove(prefix.shared_key, prefix)

    def _reusable(
        self, index: PrefixIndex[SharedSequence], sequence: SharedSequence
    ) -> tuple[SharedSequence | None, int]:
        """The donor of which a sequence can reuse the most positions, and their number; None if there are none. The last
        token of the prompt must be computed, because its hidden state is needed, unless a donor has that."""
        length = len(sequence.prompt)
        for donor in index.beginning_with(sequence.prompt_key):
            if len(donor.prompt) == length and donor.prompt_hidden is not None:
                return donor, length
        found, same = index.longest(sequence.prompt_key)
        same = min(same, length - 1)
        same -= same % self._tile
        return (found, same) if same else (None, 0)

    def _free_slot(self, slot: int) -> None:
        """Frees the slot after the running ones: a prefix kept there moves to a free slot, or to that of the least
        recently used prefix, which is dropped."""
        occupant = self._kept_at.get(slot)
        if occupant is None:
            return
        if len(self._kept) < self._cache.shape.slots - slot:
            free = next(s for s in range(slot + 1, self._cache.shape.slots) if s not in self._kept_at)
        else:
            oldest = next(iter(self._kept))
            free = oldest.slot
            self._drop(oldest)
        if free != slot:
            self._cache.copy(slot, free, occupant.cached)
            self._settle(occupant, free)

    def _move_prefix(self, donor: SharedSequence, slot: int) -> None:
        """Moves a kept prefix into the slot of a new sequence; a prefix kept there moves to the other slot."""
        occupant = self._kept_at.get(slot)
        source = donor.slot
        self._drop(donor)
        if occupant is None:
            self._cache.copy(source, slot, donor.cached)
        elif occupant is not donor:
            self._cache.swap(source, slot, donor.cached, occupant.cached)
            self._settle(occupant, source)

    def _settle(self, prefix: SharedSequence, slot: int) -> None:
        """Records that a kept prefix is in another slot now."""
        del self._kept_at[prefix.slot]
        prefix.slot = slot
        self._kept_at[slot] = prefix


def _begin(sequence: SharedSequence, donor: SharedSequence, shared: int) -> None:
    """Marks the first `shared` positions of the sequence's slot as computed."""
    sequence.cached = shared
    if shared == len(sequence.prompt):
        sequence.hidden = sequence.prompt_hidden = donor.prompt_hidden
