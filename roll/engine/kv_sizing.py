"""The size of the slot KV cache: what requests need, within a configured limit or the free memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from roll.engine.memory import free_bytes
from roll.engine.request import Request

MEMORY_SHARE = {"cuda": 0.6, "cpu": 0.5}
"""Share of a device's free memory that a KV cache may take. A CPU's memory is shared with the trainer and the
environments."""

GROWTH = 1.125
"""The cache is copied into one with more slots of the same length only if it could have this many times the slots, or the
largest number of slots."""
TRADE = 1.5
"""As `GROWTH`, if the slots get shorter: longer requests may arrive again."""

FreeBytes = Callable[[torch.device], int]


class KVBudget:
    """How many tokens a KV cache may hold."""

    def __init__(
        self, kv_tokens: int, token_bytes: int, device: torch.device, free_bytes: FreeBytes = free_bytes
    ) -> None:
        """`kv_tokens` is the limit; 0 means as many as fit into a share of the memory that is free without the cache."""
        self.kv_tokens = kv_tokens
        self._token_bytes = token_bytes
        self._device = device
        self._free_bytes = free_bytes

    def tokens(self, allocated: int = 0) -> int:
        """The limit; `allocated` is the capacity that the cache has already allocated."""
        if self.kv_tokens:
            return self.kv_tokens
        free = self._free_bytes(self._device) // self._token_bytes + allocated
        return max(1, int(self._share * free))

    def check(self, request: Request, most: int) -> None:
        """Raises if the request alone needs more than `most` tokens."""
        if request.tokens <= most:
            return
        if self.kv_tokens:
            remedy = f": write rollout.kv_cache_tokens={-(-request.tokens // 64) * 64}"
        else:
            remedy = f", in {self._share:.0%} of the memory that is free: lower rollout.max_new_tokens or env.max_tokens"
        raise ValueError(f"{request.need}, but the engine's cache holds {most}{remedy}")

    @property
    def _share(self) -> float:
        return MEMORY_SHARE["cuda" if self._device.type == "cuda" else "cpu"]


@dataclass(frozen=True)
class CacheShape:
    """The shape of a slot cache: number of slots, and positions per slot."""

    slots: int = 0
    positions: int = 0

    @property
    def tokens(self) -> int:
        return self.slots * self.positions


def rounded(tokens: int) -> int:
    """Positions of a slot for `tokens` tokens if memory allows: a power of two, so that it rarely changes."""
    return max(64, 1 << (tokens - 1).bit_length())


@dataclass(frozen=True)
class SlotSizing:
    """Chooses the shape of a slot cache. Every slot is as long as the longest request needs, so long requests mean fewer
    slots.

    Invariants: with a limit of `most` tokens, a cache that changes its shape stays within the limit also while its
    contents are copied, which happens layer by layer, and no running sequence loses its contents. If that is impossible,
    requests wait until fewer are running; the oldest gets a slot at the latest when none is running.

    Example: 4096 tokens and 30 layers. At most 30 / 31 of the tokens are used, so that one layer can exist twice. For 20
    requests of up to 100 tokens there are 32 slots of 112. A request of 1000 waits until two of them are left: then there
    are 3 slots of 1024.
    """

    slots: int
    """Largest number of slots."""
    context: int
    layers: int

    def shape(self, longest: int, slots: int, most: int, current: int = 0) -> CacheShape:
        """The shape for `slots` requests of up to `longest` tokens, or for as many of them as fit into `most` tokens, but
        at least one. `current`: the positions of the current slots, which stay if they are long enough."""
        lasting = most * self.layers // (self.layers + 1)
        positions = current
        if longest > current:
            positions = min(rounded(longest), max(self.context, longest))
            # then no longer than needed, but rounded, so that not every request changes the length
            if slots * positions > lasting:
                step = max(16, rounded(longest) // 8)
                positions = min(-(-longest // step) * step, positions)
            if positions > lasting:
                positions = longest
        return CacheShape(max(1, min(slots, self.slots, lasting // positions)), positions)

    def peak(self, old: CacheShape, new: CacheShape) -> int:
        """The largest number of tokens allocated at any moment while the contents of one cache are copied to another."""
        return max(old.tokens + -(-new.tokens // self.layers), new.tokens + -(-old.tokens // self.layers))

    def choose(
        self, current: CacheShape, running: Sequence[int], waiting: Sequence[int], prefixes: int, most: int
    ) -> tuple[CacheShape, int]:
        """The shape to use now, and how many of the waiting requests, in order, get a slot in it. `running`, `waiting`:
        tokens that requests may need; `prefixes`: slots with reusable prefixes of finished sequences."""
        shape, fit, longest = current, 0, max(running, default=0)
        for tokens in waiting:
            longest = max(longest, tokens)
            found = self._reachable(current, longest, len(running) + fit + 1, prefixes, most, moving=bool(running))
            if found is None:
                break
            shape, fit = found, fit + 1
        return shape, fit

    def _reachable(
        self, current: CacheShape, longest: int, slots: int, prefixes: int, most: int, moving: bool
    ) -> CacheShape | None:
        """The best shape with `slots` slots that is reachable now. `moving`: running sequences must be copied."""
        if slots > self.slots:
            return None
        ample = min(self.slots, 1 << (slots + prefixes - 1).bit_length())
        longer = self.shape(longest, ample, most, current.positions)
        if longest > current.positions:
            options = [longer, self.shape(longest, slots, most)]
        else:  # only the number of slots may change: for the running requests, or also for kept prefixes
            grows = slots + prefixes > current.slots and self._is_worth(current, longest, most, current.positions)
            options = [longer] if grows else []
            if slots <= current.slots:
                options.append(current)
            elif self._is_worth(current, longest, most, 0):
                options.append(self.shape(longest, ample, most))
        for shape in options:
            if shape.slots >= slots and (shape == current or not moving or self.peak(current, shape) <= most):
                return shape
        return None

    def _is_worth(self, current: CacheShape, longest: int, most: int, positions: int) -> bool:
        """Whether the cache could have enough more slots, of these positions or shorter, that copying it is
        worthwhile."""
        could = self.shape(longest, self.slots, most, positions).slots
        return could > current.slots and (
            could == self.slots or could >= (GROWTH if positions else TRADE) * current.slots
        )
