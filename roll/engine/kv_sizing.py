"""How large a cache is: what requests need, as far as a set limit or memory goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from roll.engine.memory import free_bytes
from roll.engine.request import Request

MEMORY_SHARE = {"cuda": 0.6, "cpu": 0.5}
"""Of the free memory of a device, what a cache may take; a CPU's is everybody's: the trainer's, the environments'."""

GROWTH = 1.125
"""How many times the slots there must be room for to copy what is in them into more of them."""
TRADE = 1.5
"""The same where they get shorter for it: longer requests may come again."""

FreeBytes = Callable[[torch.device], int]


class KVBudget:
    """How many tokens a cache may hold."""

    def __init__(
        self, kv_tokens: int, token_bytes: int, device: torch.device, free_bytes: FreeBytes = free_bytes
    ) -> None:
        """`kv_tokens`: as many as that; 0 for as many as a share of the memory takes that is free without the cache."""
        self.kv_tokens = kv_tokens
        self._token_bytes = token_bytes
        self._device = device
        self._free_bytes = free_bytes

    def tokens(self, held: int = 0) -> int:
        """`held`: those that the cache has room for already."""
        if self.kv_tokens:
            return self.kv_tokens
        free = self._free_bytes(self._device) // self._token_bytes + held
        return max(1, int(self._share * free))

    def check(self, request: Request, most: int) -> None:
        """Refuses a request that needs more than a cache of `most` tokens by itself."""
        if request.tokens <= most:
            return
        if self.kv_tokens:
            remedy = f": write rollout.kv_tokens={-(-request.tokens // 64) * 64}"
        else:
            remedy = f", in {self._share:.0%} of the memory that is free: lower rollout.max_new_tokens or env.max_tokens"
        raise ValueError(f"{request.need}, but the engine's cache holds {most}{remedy}")

    @property
    def _share(self) -> float:
        return MEMORY_SHARE["cuda" if self._device.type == "cuda" else "cpu"]


@dataclass(frozen=True)
class CacheShape:
    """Of a cache in slots: how many, and how many tokens each holds."""

    slots: int = 0
    positions: int = 0

    @property
    def tokens(self) -> int:
        return self.slots * self.positions


def rounded(tokens: int) -> int:
    """Positions of a slot that holds so many tokens, where there is room: a power of two, so that it seldom changes."""
    return max(64, 1 << (tokens - 1).bit_length())


@dataclass(frozen=True)
class SlotSizing:
    """Which shape a cache in slots has. Every slot is as long as the longest request needs, so there are fewer of them
    where requests are long.

    What always holds: with `most` tokens allowed, a cache whose shape changes holds no more than that while what it had
    is copied, which happens layer by layer, and nothing that runs is lost. Where that cannot be, requests wait until
    less is running; the oldest has a slot as soon as nothing is.

    Example: 4096 tokens and 30 layers. At most 30 / 31 of them are used, so that there is room for a layer twice. For 20
    requests of up to 100 tokens there are 32 slots of 112. One of 1000 waits until two of them are left: then there are
    3 slots of 1024.
    """

    slots: int
    """The most."""
    context: int
    layers: int

    def shape(self, longest: int, slots: int, most: int, held: int = 0) -> CacheShape:
        """For so many requests of up to `longest` tokens, or as many of them as `most` tokens have room for, but one at
        least. `held`: positions of the slots there are, which stay if they suffice."""
        lasting = most * self.layers // (self.layers + 1)
        positions = held
        if longest > held:
            positions = min(rounded(longest), max(self.context, longest))
            if slots * positions > lasting:  # no longer than needed, then; but not of another length for every request
                step = max(16, rounded(longest) // 8)
                positions = min(-(-longest // step) * step, positions)
            if positions > lasting:
                positions = longest
        return CacheShape(max(1, min(slots, self.slots, lasting // positions)), positions)

    def peak(self, old: CacheShape, new: CacheShape) -> int:
        """Tokens there is room for at the worst moment, while a cache takes over what another one has."""
        return max(old.tokens + -(-new.tokens // self.layers), new.tokens + -(-old.tokens // self.layers))

    def fitted(
        self, held: CacheShape, running: Sequence[int], waiting: Sequence[int], kept: int, most: int
    ) -> tuple[CacheShape, int]:
        """The shape to have now, and how many of those waiting, in order, have a slot then. `running`, `waiting`: tokens
        that requests may need; `kept`: slots with something that is worth keeping."""
        shape, fit, longest = held, 0, max(running, default=0)
        for tokens in waiting:
            longest = max(longest, tokens)
            found = self._reached(held, longest, len(running) + fit + 1, kept, most, moving=bool(running))
            if found is None:
                break
            shape, fit = found, fit + 1
        return shape, fit

    def _reached(
        self, held: CacheShape, longest: int, slots: int, kept: int, most: int, moving: bool
    ) -> CacheShape | None:
        """The best shape for so many slots that can be had now; `moving`: with what runs in those there are."""
        if slots > self.slots:
            return None
        ample = min(self.slots, 1 << (slots + kept - 1).bit_length())
        longer = self.shape(longest, ample, most, held.positions)
        if longest > held.positions:
            options = [longer, self.shape(longest, slots, most)]
        else:  # another shape is for the number of slots alone: those that run, or also those with something kept
            grows = slots + kept > held.slots and self._is_worth(held, longest, most, held.positions)
            options = [longer] if grows else []
            if slots <= held.slots:
                options.append(held)
            elif self._is_worth(held, longest, most, 0):
                options.append(self.shape(longest, ample, most))
        for shape in options:
            if shape.slots >= slots and (shape == held or not moving or self.peak(held, shape) <= most):
                return shape
        return None

    def _is_worth(self, held: CacheShape, longest: int, most: int, positions: int) -> bool:
        """Whether there could be so many more slots, of these positions or shorter, that what is here may be copied."""
        could = self.shape(longest, self.slots, most, positions).slots
        return could > held.slots and (could == self.slots or could >= (GROWTH if positions else TRADE) * held.slots)
