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
from roll.engine.paged.kv_cache import BLOCK, PagedKVCache, RoutesRead
from roll.engine.paged.model_runner import ModelRunner
from roll.engine.paged.sizing import PagedSizing
from roll.engine.paged.step_inputs import HEADER, PLACE, POSITION, SLOT, TOKEN
from roll.engine.request import Request
from roll.engine.routes import RouteShape
from roll.model.attention import logits_of
from roll.model.rope import longest_sequence
from roll.model.shape import ModelShape


@dataclass
class _Inside:
    pool: BlockPool
    pages: PagedKVCache
    steps: ModelRunner


class KVManager:
    def __init__(self, model: PreTrainedModel, slots: int, kv_tokens: int, recorded: RouteShape | None = None) -> None:
        """For `slots` sequences. `kv_tokens` is the capacity in tokens; 0 means enough for the longest request so far in
        every slot, as far as memory allows. `recorded` is the shape of the MoE routes stored beside keys and values."""
        self.recorded = recorded
        self._model = model
        self._slots = slots
        self._sizing = PagedSizing(model, slots, kv_tokens, recorded)
        self._parameter = next(model.parameters())
        self._inside: _Inside | None = None
        self._longest = 0
        self._wanted = 0
        """Blocks that the longest request required when the cache was last allocated or grown."""
        self._made_decoder: Decoder | None = None

    @property
    def pool(self) -> BlockPool:
        return self._open.pool

    @property
    def steps(self) -> ModelRunner:
        return self._open.steps

    def read_routes(self, places: NDArray[np.int64]) -> RoutesRead:
        """Starts reading the routes recorded at these cache positions."""
        return self._open.pages.read_routes(places)

    @property
    def used_tokens(self) -> int:
        return self._inside.pool.used * BLOCK if self._inside is not None else 0

    @property
    def _open(self) -> _Inside:
        assert self._inside is not None, "no request has come yet"
        return self._inside

    @property
    def _decoder(self) -> Decoder:
        if self._made_decoder is None:
            positions = longest_sequence(self._model.config)
            self._made_decoder = make_decoder(self._model, positions, self.recorded is not None)
        return self._made_decoder

    @cached_property
    def _capturing(self) -> torch.cuda.Stream | None:
        """One stream for all captures: cuBLAS keeps a workspace of tens of megabytes for every stream it ran on."""
        return torch.cuda.Stream(self._parameter.device) if self._parameter.is_cuda else None  # type: ignore[no-untyped-call]

    def announce(self, request: Request) -> None:
        """Registers a request that will be admitted later. Raises if it can never fit."""
        here = self._inside
        if here is None or request.tokens > here.pool.tokens:
            self._sizing.limit.check(request, self._sizing.most_tokens(here.pool.count if here is not None else 0))
        self._longest = max(self._longest, request.tokens)

    def prepare(self, settle: Callable[[], None]) -> BlockPool:
        """Returns the block pool. Allocates it on the first call, and grows it if there are too few blocks for the
        longest request. `settle` returns when no step is in flight."""
        wanted = self._sizing.wanted(self._longest)
        if self._inside is None:
            self._inside = self._make(min(wanted, self._sizing.most_tokens() // BLOCK + 1))
        elif wanted > max(self._inside.pool.count, self._wanted):
            settle()
            self._grow(self._inside, wanted)
        self._wanted = wanted
        return self._inside.pool

    def _make(self, blocks: int) -> _Inside:
        pages, width = self._sizing.pages(blocks), self._sizing.width(blocks)
        steps = ModelRunner(self._model, self._decoder, pages, self._slots, width, self._capturing)
        return _Inside(BlockPool(blocks, BLOCK), pages, steps)

    def _grow(self, here: _Inside, wanted: int) -> None:
        """Grows the cache and copies its contents, as far as there is memory for both copies."""
        blocks = self._sizing.beside(wanted, here.pool.count)
        if blocks > here.pool.count:
            pages = self._sizing.pages(blocks)
            pages.take_over(here.pages)
            here.steps.move(pages, self._sizing.width(blocks))
            here.pool.grow(blocks)
            here.pages = pages

    def reallocate(self, request: Request, blocks: int) -> BlockPool:
        """Replaces the cache by a larger one without keeping its contents, because there was no memory for both
        copies."""
        self._leave()
        pool = self.prepare(_nothing)
        if blocks > pool.count - 1:
            raise RunError(f"{request.need}, but memory has room for {pool.tokens}: others have taken it meanwhile")
        return pool

    def close(self) -> None:
        """Frees the memory until the next request. No sequence may be running."""
        self._made_decoder = None  # it references the parameters' storage, which may be offloaded now
        self._leave()

    def _leave(self) -> None:
        self._inside = None
        self._sizing.reset()
        if self._parameter.is_cuda:
            torch.cuda.empty_cache()

    def evict_all(self) -> None:
        """Drops all block keys: no cached prefix may be reused any more."""
        if self._inside is not None:
            self._inside.pool.evict_all()

    def log_probs_of(self, ids: IntArray) -> Tensor:
        """fp32 log-probs of the tokens after the first. Running sequences are not affected."""
        if self._inside is not None and (found := self._log_probs_by_step(ids, self._inside)) is not None:
            return found
        shape = ModelShape.of_model(self._model)
        return log_probs_of(self._decoder, lambda hidden: logits_of(self._model, hidden), shape, ids, self._parameter)

    def _log_probs_by_step(self, ids: IntArray, here: _Inside) -> Tensor | None:
        """As `log_probs_of`, through a captured decode step, the way tokens are sampled. None if the sequence has more
        tokens than a step has slots, or if there are too few spare blocks."""
        count, blocks = len(ids), -(-len(ids) // BLOCK)
        if not self._parameter.is_cuda or count > self._slots or blocks > here.pool.spare:
            return None
        taken = here.pool.take(blocks)
        sheet = np.zeros((HEADER + blocks, count), np.int32)
        sheet[SLOT] = self._slots
        sheet[POSITION] = np.arange(count)
        sheet[TOKEN] = ids
        sheet[PLACE] = np.repeat(np.array(taken, np.int32) * BLOCK, BLOCK)[:count] + sheet[POSITION] % BLOCK
        sheet[HEADER:] = np.array(taken, np.int32)[:, None]
        found = torch.log_softmax(here.steps.logits(sheet), dim=-1)
        here.pool.release(taken)
        return found[:-1].gather(1, torch.from_numpy(np.asarray(ids[1:], np.int64)).to(found.device)[:, None])[:, 0].cpu()


def _nothing() -> None:
    """No step is in flight, because no sequence is running."""
