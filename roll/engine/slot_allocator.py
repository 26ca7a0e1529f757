"""Who has which slot of the cache: the sequences that run, and what is kept of those that ended.

What always holds: running sequences have slots 0 … n-1 without holes. A sequence that ends stays in a slot that nobody
runs in, until one is needed (the one unused for longest goes first) or other weights come. So the next turn of a
conversation, a request resumed from its prefix or a sibling that comes late finds its beginning. When the cache gets
another shape, everything moves along, as far as there are slots for it.

Example with four slots: A, B, C run in 0, 1, 2. A ends: it changes places with C, so that C, B run in 0, 1 and A is kept
in 2. A's next turn takes over slot 2 as it is and computes only what is new.
"""

from __future__ import annotations

from dataclasses import dataclass

from roll.data.tokenlog import IntArray, begin_alike, common_prefix
from roll.engine.cache import SlotCache
from roll.engine.kv_sizing import CacheShape
from roll.engine.shared_sequence import SharedSequence


@dataclass(eq=False)
class _Kept:
    slot: int
    sequence: SharedSequence
    tokens: IntArray
    """Those whose keys and values another sequence may begin with."""


class SlotAllocator:
    """`tile` > 1: only beginnings that are multiples of it are shared, and only of prompts, because what is computed
    token by token has other bits than what is computed in tiles."""

    def __init__(self, cache: SlotCache, tile: int = 1) -> None:
        self.running: list[SharedSequence] = []
        self._cache = cache
        self._tile = tile
        self._kept: list[_Kept] = []  # the one unused for longest first

    def forget(self) -> None:
        """Drops what is kept."""
        self._kept.clear()

    @property
    def kept(self) -> int:
        """Slots with something of sequences that ended."""
        return len(self._kept)

    def place(self, fresh: list[SharedSequence], shape: CacheShape) -> int:
        """Gives new sequences slots after the running ones, with what is kept of their beginnings, in a cache of this
        shape. Tokens shared."""
        donors = [self._best_kept(sequence.prompt) for sequence in fresh]
        for donor, _ in donors:
            if donor is not None:  # what one of them can use is dropped last
                self._kept.remove(donor)
                self._kept.append(donor)
        if shape != self._cache.shape:
            self._reshape(shape)
        return sum(self._place(sequence, *donor) for sequence, donor in zip(fresh, donors, strict=True))

    def _reshape(self, shape: CacheShape) -> None:
        """What is kept goes as far as there are no slots for it, or they are too short."""
        room = shape.slots - len(self.running)
        fitting = [kept for kept in self._kept if kept.sequence.cached <= shape.positions]
        self._kept = fitting[max(len(fitting) - room, 0) :]
        sources = [(slot, sequence.cached) for slot, sequence in enumerate(self.running)]
        sources += [(kept.slot, kept.sequence.cached) for kept in self._kept]
        self._cache.reshape(shape, sources)
        for slot, kept in enumerate(self._kept, len(self.running)):
            kept.slot = slot

    def _place(self, sequence: SharedSequence, donor: _Kept | None, shared: int) -> int:
        slot = len(self.running)
        if donor is None or donor not in self._kept:
            self._clear(slot)
            shared = 0
        elif shared == len(donor.tokens) or len(self.running) + len(self._kept) == self._cache.shape.slots:
            self._bring(donor, slot)
        else:
            self._clear(slot)
            self._cache.copy(donor.slot, slot, shared)
        if donor is not None:
            _begin(sequence, donor.sequence, shared)
        self.running.append(sequence)
        return shared

    def fork(self, slot: int, copied: SharedSequence) -> None:
        """Puts a copy of a running sequence into a slot of its own."""
        self._clear(len(self.running))
        self._cache.copy(slot, len(self.running), copied.cached)
        self.running.append(copied)

    def share(self, slot: int) -> int:
        """Copies the longest beginning that another running sequence of the same weights has. Tokens shared."""
        sequence = self.running[slot]
        best, most = sequence, sequence.cached
        source = slot
        for other, donor in enumerate(self.running):
            if donor.version == sequence.version and donor.cached and donor is not sequence:
                shared = self._shareable(donor, donor.prompt[: donor.cached], sequence.prompt, most)
                if shared > most:
                    source, best, most = other, donor, shared
        if best is sequence:
            return 0
        gained = most - sequence.cached
        self._cache.copy(source, slot, most)
        _begin(sequence, best, most)
        return gained

    def retire(self, slot: int, keep: bool) -> None:
        """Takes a sequence out of the running ones. The last of these takes its slot, so that there is no hole."""
        last = len(self.running) - 1
        ended = self.running[slot]
        if slot < last:
            self._cache.swap(slot, last, ended.cached, self.running[last].cached)
            self.running[slot] = self.running[last]
        self.running.pop()
        tokens = ended.prompt[: ended.cached] if self._tile > 1 else ended.cached_tokens
        if keep and len(tokens):
            self._kept.append(_Kept(last, ended, tokens))

    def _best_kept(self, prompt: IntArray) -> tuple[_Kept | None, int]:
        best, most = None, 0
        for kept in self._kept:
            shared = self._shareable(kept.sequence, kept.tokens, prompt, most)
            if shared > most:
                best, most = kept, shared
        return best, most

    def _shareable(self, donor: SharedSequence, tokens: IntArray, prompt: IntArray, above: int) -> int:
        """How many positions of the donor a sequence with this prompt may begin with; 0 where it is not more than
        `above`. Of its own prompt the last token must be computed, for its hidden state, unless the donor has that."""
        if not begin_alike(tokens, prompt, above + 1):
            return 0
        same = common_prefix(tokens, prompt)
        if same == len(prompt) == len(donor.prompt) and donor.prompt_hidden is not None:
            return same
        same = min(same, len(prompt) - 1)
        return same - same % self._tile

    def _clear(self, slot: int) -> None:
        """Makes a slot free: what is kept there moves, into a free slot or that of what was unused for longest."""
        there = next((kept for kept in self._kept if kept.slot == slot), None)
        if there is None:
            return
        taken = {kept.slot for kept in self._kept}
        free = next((s for s in range(slot + 1, self._cache.shape.slots) if s not in taken), None)
        if free is None:
            free = self._kept.pop(0).slot
        if free != slot:
            self._cache.copy(slot, free, there.sequence.cached)
            there.slot = free

    def _bring(self, donor: _Kept, slot: int) -> None:
        """Moves what is kept into a slot to run in; what is kept there takes its place."""
        there = next((kept for kept in self._kept if kept.slot == slot), None)
        if there is None:
            self._cache.copy(donor.slot, slot, donor.sequence.cached)
        elif there is not donor:
            self._cache.swap(donor.slot, slot, donor.sequence.cached, there.sequence.cached)
            there.slot = donor.slot
        self._kept.remove(donor)


def _begin(sequence: SharedSequence, donor: SharedSequence, shared: int) -> None:
    """Notes that the sequence's slot holds so many positions of the donor."""
    sequence.cached = shared
    if shared == len(sequence.prompt):
        sequence.hidden = sequence.prompt_hidden = donor.prompt_hidden
