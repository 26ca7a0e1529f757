"""The room that an engine computes in: blocks, the memory they name, and the steps that run over it.

What always holds: it is there from the first request on until it is closed; it grows with all that is in it, and only
while no step is in flight; where it cannot grow beside itself, it is made anew once nobody is in it.
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
        """For `slots` sequences. `kv_tokens`: what it holds; 0 for what the longest request so far needs in every slot,
        as far as memory goes. `recorded`: the routes that it holds beside keys and values."""
        self.recorded = recorded
        self._model = model
        self._slots = slots
        self._sizing = PagedSizing(model, slots, kv_tokens, recorded)
        self._parameter = next(model.parameters())
        self._inside: _Inside | None = None
        self._longest = 0
        self._wanted = 0
        """Blocks that the longest request asked for when it was last made or grown."""
        self._made_decoder: Decoder | None = None

    @property
    def pool(self) -> BlockPool:
        return self._open.pool

    @property
    def steps(self) -> ModelRunner:
        return self._open.steps

    def read_routes(self, places: NDArray[np.int64]) -> RoutesRead:
        """Begins to read what is recorded at these places."""
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
        """One for all graphs there ever are: cuBLAS keeps tens of megabytes for every stream it ran on."""
        return torch.cuda.Stream(self._parameter.device) if self._parameter.is_cuda else None  # type: ignore[no-untyped-call]

    def announce(self, request: Request) -> None:
        """A request will come, which is refused if there can never be room for it."""
        here = self._inside
        if here is None or request.tokens > here.pool.tokens:
            self._sizing.limit.check(request, self._sizing.most_tokens(here.pool.count if here is not None else 0))
        self._longest = max(self._longest, request.tokens)

    def prepare(self, settle: Callable[[], None]) -> BlockPool:
        """The blocks; made, or made more, where there are too few for the longest request. `settle` returns when no step
        is in flight."""
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
        """More blocks with the same contents, as far as memory has room for both."""
        blocks = self._sizing.beside(wanted, here.pool.count)
        if blocks > here.pool.count:
            pages = self._sizing.pages(blocks)
            pages.take_over(here.pages)
            here.steps.move(pages, self._sizing.width(blocks))
            here.pool.grow(blocks)
            here.pages = pages

    def make_anew(self, request: Request, blocks: int) -> BlockPool:
        """Other blocks in the place of those there are, which could not be made more beside themselves."""
        self._leave()
        pool = self.prepare(_nothing)
        if blocks > pool.count - 1:
            raise RunError(f"{request.need}, but memory has room for {pool.tokens}: others have taken it meanwhile")
        return pool

    def close(self) -> None:
        """Frees its memory until the next request; nobody may be in it."""
        self._made_decoder = None  # it holds the parameters' storage, which may be laid aside now
        self._leave()

    def _leave(self) -> None:
        self._inside = None
        self._sizing.forget()
        if self._parameter.is_cuda:
            torch.cuda.empty_cache()

    def forget_all(self) -> None:
        """What is in the cache is nobody's beginning any more."""
        if self._inside is not None:
            self._inside.pool.forget_all()

    def log_probs_of(self, ids: IntArray) -> Tensor:
        """fp32 log-probs of a sequence's tokens after the first, computed as a prompt is; nothing running is touched."""
        if self._inside is not None and (found := self._log_probs_by_step(ids, self._inside)) is not None:
            return found
        shape = ModelShape.of_model(self._model)
        return log_probs_of(self._decoder, lambda hidden: logits_of(self._model, hidden), shape, ids, self._parameter)

    def _log_probs_by_step(self, ids: IntArray, here: _Inside) -> Tensor | None:
        """The same through a captured step, as tokens are drawn, if there is one so large and there are blocks for it."""
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
    """No step is in flight where nobody is in the room."""
