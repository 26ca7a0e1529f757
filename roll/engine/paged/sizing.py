"""The size of the paged KV cache: what requests need, as far as memory allows."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from roll.engine.kv_sizing import KVBudget
from roll.engine.paged.kv_cache import BLOCK, PagedKVCache
from roll.engine.routes import RouteShape
from roll.model.rope import longest_sequence
from roll.model.shape import ModelShape

GROWTH_SHARE = 0.9
"""Share of a GPU's free memory that a larger cache may take while the smaller one still exists."""
SHORTEST = 256
"""Least capacity per slot in tokens, as far as memory allows."""


def roomy(longest: int, context: int) -> int:
    """Capacity per slot in tokens if the longest request has `longest` tokens."""
    return min(context, max(SHORTEST, 1 << (longest - 1).bit_length()))


class PagedSizing:
    def __init__(self, model: PreTrainedModel, slots: int, kv_tokens: int, recorded: RouteShape | None = None) -> None:
        """`kv_tokens` is the capacity in tokens; 0 means enough for the requests of all slots. `recorded` is the shape of
        the routes stored beside keys and values."""
        self._recorded = recorded
        parameter = next(model.parameters())
        self._shape, self._dtype, self._device = ModelShape.of_model(model), parameter.dtype, parameter.device
        self._block_bytes = PagedKVCache.bytes_per_block(self._shape, self._dtype, recorded)
        self._context = longest_sequence(model.config)
        self._slots = slots
        self.limit = KVBudget(kv_tokens, self._block_bytes // BLOCK, self._device)
        self._most: int | None = None
        """The limit in tokens as last computed; None before that, and after `reset`."""

    def required_blocks(self, longest: int) -> int:
        """Number of blocks for requests of up to `longest` tokens."""
        if self.limit.kv_tokens:
            return max(2, self.limit.kv_tokens // BLOCK + 1)
        return self._slots * -(-roomy(longest, self._context) // BLOCK) + 1

    def most_tokens(self, blocks: int = 0) -> int:
        """Largest capacity in tokens, if the cache has `blocks` blocks now."""
        if self._most is None:
            self._most = max(1, self.limit.tokens(blocks * BLOCK) // BLOCK) * BLOCK
        return self._most

    def reset(self) -> None:
        """Drops the computed limit: other programs may have allocated memory since."""
        self._most = None

    def growable_blocks(self, required: int, blocks: int) -> int:
        """As many of the `required` blocks of a larger cache as fit while the cache of `blocks` blocks still exists."""
        most = min(required, self.most_tokens(blocks) // BLOCK + 1)
        if self._device.type != "cuda":
            return most
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        return min(most, int(GROWTH_SHARE * free) // self._block_bytes)

    def make_cache(self, blocks: int) -> PagedKVCache:
        return PagedKVCache(self._shape, blocks, self._dtype, self._device, self._recorded)

    def width(self, blocks: int) -> int:
        """Number of blocks of the longest sequence."""
        return min(-(-self._context // BLOCK), blocks)
