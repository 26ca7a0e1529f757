"""Allocates the slots of the KV cache to running sequences and to reusable prefixes of finished ones.

Invariants: running sequences have slots 0 … n-1 without holes. A finished sequence stays cached in a free slot until the
slot is needed (least recently used first) or the weights change. So the next turn of a conversation, a resumed request or
a later sample of the same group finds its prefix. When the cache changes its shape, running sequences are copied, and
kept ones as far as there are slots.

Example with four slots: A, B, C run in 0, 1, 2. A ends and swaps slots with C, so that C, B run in 0, 1 and A is kept in
2. A's next turn takes over slot 2 without a copy and computes only its new tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from roll.data.tokenlog import IntArray, common_prefix, share_prefix
from roll.engine.cache import SlotCache
from roll.engine.kv_sizing import CacheShape
from roll.engine.shared_sequence import SharedSequence


@dataclass(eq=False)
class _CachedPrefix:
    slot: int
    sequence: SharedSequence
    tokens: IntArray
    """Tokens whose keys and values another sequence can reuse."""


class SlotAllocator:
    """With `tile` > 1, only prefixes whose length is a multiple of it are shared, and only those of prompts, because keys
    and values computed token by token have different bits than those computed in tiles."""

    def __init__(self, cache: SlotCache, tile: int = 1) -> None:
        self.running: list[SharedSequence] = []
        self._cache = cache
        self._tile = tile
        self._prefixes: list[_CachedPrefix] = []  # least recently used first

    def evict_all(self) -> None:
        """Drops all kept prefixes."""
        self._prefixes.clear()

    @property
    def cached_prefix_count(self) -> int:
        """Number of slots with kept prefixes."""
        return len(self._prefixes)

    def admit(self, fresh: list[SharedSequence], shape: CacheShape) -> int:
        """Gives new sequences slots after the running ones, in a cache of this shape, with kept prefixes reused. Returns
        the number of tokens shared."""
        donors = [self._best_prefix(sequence.prompt) for sequence in fresh]
        for donor, _ in donors:
            if donor is not None:  # move it to the end, so that it is evicted last
                self._prefixes.remove(donor)
                self._prefixes.append(donor)
        if shape != self._cache.shape:
            self._reshape(shape)
        return sum(self._assign_slot(sequence, *donor) for sequence, donor in zip(fresh, donors, strict=True))

    def _reshape(self, shape: CacheShape) -> None:
        """Changes the cache's shape. Kept prefixes are dropped if there are too few slots or the slots are too short."""
        free = shape.slots - len(self.running)
        fitting = [prefix for prefix in self._prefixes if prefix.sequence.cached <= shape.positions]
        self._prefixes = fitting[max(len(fitting) - free, 0) :]
        sources = [(slot, sequence.cached) for slot, sequence in enumerate(self.running)]
        sources += [(prefix.slot, prefix.sequence.cached) for prefix in self._prefixes]
        self._cache.reshape(shape, sources)
        for slot, prefix in enumerate(self._prefixes, len(self.running)):
            prefix.slot = slot

    def _assign_slot(self, sequence: SharedSequence, donor: _CachedPrefix | None, shared: int) -> int:
        slot = len(self.running)
        if donor is None or donor not in self._prefixes:
            self._free_slot(slot)
            shared = 0
        elif shared == len(donor.tokens) or len(self.running) + len(self._prefixes) == self._cache.shape.slots:
            self._move_prefix(donor, slot)
        else:
            self._free_slot(slot)
            self._cache.copy(donor.slot, slot, shared)
        if donor is not None:
            _begin(sequence, donor.sequence, shared)
        self.running.append(sequence)
        return shared

    def fork(self, slot: int, copied: SharedSequence) -> None:
        """Puts a copy of a running sequence into a slot of its own."""
        self._free_slot(len(self.running))
        self._cache.copy(slot, len(self.running), copied.cached)
        self.running.append(copied)

    def share(self, slot: int) -> int:
        """Copies the longest prefix that another running sequence of the same weights has. Returns the number of tokens
        gained."""
        sequence = self.running[slot]
        best, longest = sequence, sequence.cached
        source = slot
        for other, donor in enumerate(self.running):
            if donor.version == sequence.version and donor.cached and donor is not sequence:
                shared = self._shareable(donor, donor.prompt[: donor.cached], sequence.prompt, longest)
                if shared > longest:
                    source, best, longest = other, donor, shared
        if best is sequence:
            return 0
        gained = longest - sequence.cached
        self._cache.copy(source, slot, longest)
        _begin(sequence, best, longest)
        return gained

    def retire(self, slot: int, cache_prefix: bool) -> None:
        """Removes a sequence from the running ones. The last running one takes its slot, so that there is no hole."""
        last = len(self.running) - 1
        ended = self.running[slot]
        if slot < last:
            self._cache.swap(slot, last, ended.cached, self.running[last].cached)
            self.running[slot] = self.running[last]
        self.running.pop()
        tokens = ended.prompt[: ended.cached] if self._tile > 1 else ended.cached_tokens
        if cache_prefix and len(tokens):
            self._prefixes.append(_CachedPrefix(last, ended, tokens))

    def _best_prefix(self, prompt: IntArray) -> tuple[_CachedPrefix | None, int]:
        best, longest = None, 0
        for prefix in self._prefixes:
            shared = self._shareable(prefix.sequence, prefix.tokens, prompt, longest)
            if shared > longest:
                best, longest = prefix, shared
        return best, longest

    def _shareable(self, donor: SharedSequence, tokens: IntArray, prompt: IntArray, above: int) -> int:
        """How many positions of the donor a sequence with this prompt can reuse; 0 if not more than `above`. The last
        token of the prompt must be computed, because its hidden state is needed, unless the donor has that."""
        if not share_prefix(tokens, prompt, above + 1):
            return 0
        same = common_prefix(tokens, prompt)
        if same == len(prompt) == len(donor.prompt) and donor.prompt_hidden is not None:
            return same
        same = min(same, len(prompt) - 1)
        return same - same % self._tile

    def _free_slot(self, slot: int) -> None:
        """Frees a slot: a prefix kept there moves to a free slot, or to that of the least recently used prefix, which is
        dropped."""
        occupant = next((prefix for prefix in self._prefixes if prefix.slot == slot), None)
        if occupant is None:
            return
        taken = {prefix.slot for prefix in self._prefixes}
        free = next((s for s in range(slot + 1, self._cache.shape.slots) if s not in taken), None)
        if free is None:
            free = self._prefixes.pop(0).slot
        if free != slot:
            self._cache.copy(slot, free, occupant.sequence.cached)
            occupant.slot = free

    def _move_prefix(self, donor: _CachedPrefix, slot: int) -> None:
        """Moves a kept prefix into the slot of a new sequence; a prefix kept there moves to the other slot."""
        occupant = next((prefix for prefix in self._prefixes if prefix.slot == slot), None)
        if occupant is None:
            self._cache.copy(donor.slot, slot, donor.sequence.cached)
        elif occupant is not donor:
            self._cache.swap(donor.slot, slot, donor.sequence.cached, occupant.sequence.cached)
            occupant.slot = donor.slot
        self._prefixes.remove(donor)


def _begin(sequence: SharedSequence, donor: SharedSequence, shared: int) -> None:
    """Marks the first `shared` positions of the sequence's slot as computed."""
    sequence.cached = shared
    if shared == len(sequence.prompt):
        sequence.hidden = sequence.prompt_hidden = donor.prompt_hidden
