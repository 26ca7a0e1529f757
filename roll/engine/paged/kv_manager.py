"""Owns the KV cache, its block pool and the model runner with its CUDA graphs, which are allocated and grown together.

Invariants: they are allocated on the first request and freed by `close`. The cache grows with its contents copied, and
only while no step is in flight. If there is no memory for both copies, it is reallocated once all sequences have
finished.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from roll.config.errors import RunError
from roll.data.tokenlog import IntArray
from roll.engine.paged.blocks import BlockPool
from roll.engine.paged.decoder import Decoder, log_probs_of, make_decoder
from roll.engine.paged.kv_cache import BLOCK, PagedKVCache, PendingRoutes
from roll.engine.paged.model_runner import ModelRunner
from roll.engine.paged.sizing import PagedSizing
from roll.engine.paged.step_inputs import CACHE_POSITION, HEADER, POSITION, SLOT, TOKEN
from roll.engine.request import Request
from roll.engine.routes import RouteShape
from roll.model.attention import logits_of
from roll.model.rope import longest_sequence
from roll.model.shape import ModelShape


@dataclass
class _ExecutionState:
    pool: BlockPool
    cache: PagedKVCache
    runner: ModelRunner


class KVManager:
    def __init__(self, model: PreTrainedModel, slots: int, kv_tokens: int, recorded: RouteShape | None = None) -> None:
        """For `slots` sequences. `kv_tokens` is the capacity in tokens; 0 means enough for the longest request so far in
        every slot, as far as memory allows. `recorded` is the shape of the MoE routes stored beside keys and values."""
        self.recorded = recorded
        self._model = model
        self._slots = slots
        self._sizing = PagedSizing(model, slots, kv_tokens, recorded)
        self._parameter = next(model.parameters())
        self._state: _ExecutionState | None = None
        self._longest = 0
        self._required_blocks = 0
        """Blocks that the longest request required when the cache was last allocated or grown."""
        self._cached_decoder: Decoder | None = None

    @property
    def pool(self) -> BlockPool:
        return self._allocated.pool

    @property
    def runner(self) -> ModelRunner:
        return self._allocated.runner

    def read_routes(self, cache_positions: NDArray[np.int64]) -> PendingRoutes:
        """Starts reading the routes recorded at these cache positions."""
        return self._allocated.cache.read_routes(cache_positions)

    @property
    def used_tokens(self) -> int:
        return self._state.pool.used * BLOCK if self._state is not None else 0

    @property
    def _allocated(self) -> _ExecutionState:
        assert self._state is not None, "no request has come yet"
        return self._state

    @property
    def _decoder(self) -> Decoder:
        if self._cached_decoder is None:
            positions = longest_sequence(self._model.config)
            self._cached_decoder = make_decoder(self._model, positions, self.recorded is not None)
        return self._cached_decoder

    @cached_property
    def _capturing(self) -> torch.cuda.Stream | None:
        """One stream for all captures: cuBLAS keeps a workspace of tens of megabytes for every stream it ran on."""
        return torch.cuda.Stream(self._parameter.device) if self._parameter.is_cuda else None  # type: ignore[no-untyped-call]

    def announce(self, request: Request) -> None:
        """Registers a request that will be admitted later. Raises if it can never fit."""
        state = self._state
        if state is None or request.tokens > state.pool.tokens:
            self._sizing.limit.check(request, self._sizing.most_tokens(state.pool.count if state is not None else 0))
        self._longest = max(self._longest, request.tokens)

    def prepare(self, settle: Callable[[], None]) -> BlockPool:
        """Returns the block pool. Allocates it on the first call, and grows it if there are too few blocks for the
        longest request. `settle` returns when no step is in flight."""
        required = self._sizing.required_blocks(self._longest)
        if self._state is None:
            self._state = self._make(min(required, self._sizing.most_tokens() // BLOCK + 1))
        elif required > max(self._state.pool.count, self._required_blocks):
            settle()
            self._grow(self._state, required)
        self._required_blocks = required
        return self._state.pool

    def _make(self, blocks: int) -> _ExecutionState:
        cache, width = self._sizing.make_cache(blocks), self._sizing.width(blocks)
        runner = ModelRunner(self._model, self._decoder, cache, self._slots, width, self._capturing)
        return _ExecutionState(BlockPool(blocks, BLOCK), cache, runner)

    def _grow(self, state: _ExecutionState, required: int) -> None:
        """Grows the cache and copies its contents, as far as there is memory for both copies."""
        blocks = self._sizing.growable_blocks(required, state.pool.count)
        if blocks > state.pool.count:
            cache = self._sizing.make_cache(blocks)
            cache.copy_from(state.cache)
            state.runner.switch_cache(cache, self._sizing.width(blocks))
            state.pool.grow(blocks)
            state.cache = cache

    def reallocate(self, request: Request, blocks: int) -> BlockPool:
        """Replaces the cache by a larger one without keeping its contents, because there was no memory for both
        copies."""
        self._free()
        pool = self.prepare(_nothing)
        if blocks > pool.count - 1:
            raise RunError(f"{request.need}, but the free memory holds only {pool.tokens}: it has shrunk since")
        return pool

    def close(self) -> None:
        """Frees the memory until the next request. No sequence may be running."""
        self._cached_decoder = None  # it references the parameters' storage, which may be offloaded now
        self._free()

    def _free(self) -> None:
        self._state = None
        self._sizing.reset()
        if self._parameter.is_cuda:
            torch.cuda.empty_cache()

    def evict_all(self) -> None:
        """Drops all block keys: no cached prefix may be reused any more."""
        if self._state is not None:
            self._state.pool.evict_all()

    def log_probs_of(self, ids: IntArray) -> Tensor:
        """fp32 log-probs of the tokens after the first. Running sequences are not affected."""
        if self._state is not None and (found := self._log_probs_by_step(ids, self._state)) is not None:
            return found
        shape = ModelShape.of_model(self._model)
        return log_probs_of(self._decoder, lambda hidden: logits_of(self._model, hidden), shape, ids, self._parameter)

    def _log_probs_by_step(self, ids: IntArray, state: _ExecutionState) -> Tensor | None:
        """As `log_probs_of`, through a captured decode step, the way tokens are sampled. None if the sequence has more
        tokens than a step has slots, or if there are too few spare blocks."""
        count, blocks = len(ids), -(-len(ids) // BLOCK)
        if not self._parameter.is_cuda or count > self._slots or blocks > state.pool.spare:
            return None
        taken = state.pool.take(blocks)
        table = np.zeros((HEADER + blocks, count), np.int32)
        table[SLOT] = self._slots
        table[POSITION] = np.arange(count)
        table[TOKEN] = ids
        table[CACHE_POSITION] = np.repeat(np.array(taken, np.int32) * BLOCK, BLOCK)[:count] + table[POSITION] % BLOCK
        table[HEADER:] = np.array(taken, np.int32)[:, None]
        found = torch.log_softmax(state.runner.logits(table), dim=-1)
        state.pool.release(taken)
        return found[:-1].gather(1, torch.from_numpy(np.asarray(ids[1:], np.int64)).to(found.device)[:, None])[:, 0].cpu()


def _nothing() -> None:
    """No step is in flight, because no sequence is running."""
