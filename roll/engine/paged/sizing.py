"""How large a paged cache is: what requests need, as far as memory goes."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from roll.engine.kv_sizing import KVBudget
from roll.engine.paged.kv_cache import BLOCK, PagedKVCache
from roll.engine.routes import RouteShape
from roll.model.rope import longest_sequence
from roll.model.shape import ModelShape

GROWTH_SHARE = 0.9
"""Of the free memory of a GPU, what a larger cache may take while the smaller one is still there."""
SHORTEST = 256
"""Tokens that the cache has room for in every slot at least, as far as memory goes."""


def roomy(longest: int, context: int) -> int:
    """Tokens of a slot's share of the cache where requests have up to so many."""
    return min(context, max(SHORTEST, 1 << (longest - 1).bit_length()))


class PagedSizing:
    def __init__(self, model: PreTrainedModel, slots: int, kv_tokens: int, recorded: RouteShape | None = None) -> None:
        """`kv_tokens`: what the cache holds; 0 for what the requests of all slots need. `recorded`: the routes that stand
        beside keys and values."""
        self._recorded = recorded
        parameter = next(model.parameters())
        self._shape, self._dtype, self._device = ModelShape.of_model(model), parameter.dtype, parameter.device
        self._block_bytes = PagedKVCache.bytes_a_block(self._shape, self._dtype, recorded)
        self._context = longest_sequence(model.config)
        self._slots = slots
        self.limit = KVBudget(kv_tokens, self._block_bytes // BLOCK, self._device)
        self._most: int | None = None
        """Tokens of the limit when it was last asked for."""

    def wanted(self, longest: int) -> int:
        """Blocks for requests of up to so many tokens."""
        if self.limit.kv_tokens:
            return max(2, self.limit.kv_tokens // BLOCK + 1)
        return self._slots * -(-roomy(longest, self._context) // BLOCK) + 1

    def most_tokens(self, blocks: int = 0) -> int:
        """What the cache could hold at most, where it has so many blocks now."""
        if self._most is None:
            self._most = max(1, self.limit.tokens(blocks * BLOCK) // BLOCK) * BLOCK
        return self._most

    def forget(self) -> None:
        """Memory is asked again: others may have taken some."""
        self._most = None

    def beside(self, wanted: int, blocks: int) -> int:
        """Of the blocks wanted for a larger cache, as many as fit while the one of `blocks` is still there."""
        most = min(wanted, self.most_tokens(blocks) // BLOCK + 1)
        if self._device.type != "cuda":
            return most
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        return min(most, int(GROWTH_SHARE * free) // self._block_bytes)

    def pages(self, blocks: int) -> PagedKVCache:
        return PagedKVCache(self._shape, blocks, self._dtype, self._device, self._recorded)

    def width(self, blocks: int) -> int:
        """Blocks of the longest sequence."""
        return min(-(-self._context // BLOCK), blocks)
