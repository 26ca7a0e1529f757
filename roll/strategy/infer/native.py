"""The embedded engine as an inference strategy, in its process's event loop.

Invariants: nothing is generated before weights are loaded and verified; every submitted request ends in exactly one
completion; the engine steps only while a caller waits for results, and lets other coroutines run between steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from roll.config.errors import RunError
from roll.engine.factory import make_engine
from roll.engine.request import Completion, Progress, Request
from roll.engine.slot_engine import EngineStats, SlotEngine
from roll.strategy.offload import Residency, TensorOffloader
from roll.weight_sync.stream import WeightManifest
from roll.weight_sync.weights import Weights, check_probe, check_shared, named_tensors

if TYPE_CHECKING:
    from roll.engine.paged.engine import PagedEngine

_PAUSE_S = 0.05
"""How often a paused engine checks for aborted requests."""


class NativeStrategy:
    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_running: int,
        exact: bool,
        kv_tokens: int = 0,
        records_routes: bool = False,
        model: PreTrainedModel | None = None,
        make_model: Callable[[], PreTrainedModel] | None = None,
    ) -> None:
        """`model` is the engine's own, to receive weights into. Without it the engine uses the model of the weights it is
        given, or creates one with `make_model` when weights first come from another process. `kv_tokens` limits the
        tokens in the KV cache; 0 means what the requests need, as far as memory allows. With `records_routes`,
        completions contain the experts that each token was routed to, if the model has experts."""
        self._tokenizer = tokenizer
        self._own_model = model
        self._make_model = make_model
        self._offloader = TensorOffloader(next(model.parameters()).device) if model is not None else None
        self._max_running = max_running
        self._exact = exact
        self._kv_tokens = kv_tokens
        self._records_routes = records_routes
        self._engine: SlotEngine | PagedEngine | None = None
        self._verified = False
        self._finished: list[Completion] = []
        self._running = asyncio.Event()
        self._running.set()

    @property
    def engine(self) -> SlotEngine | PagedEngine:
        if self._engine is None:
            raise RunError("the engine has no weights yet: publish a version before generating")
        if not self._verified:
            raise RunError(f"the engine's weights after version {self._engine.version} were refused: publish again")
        return self._engine

    def submit(self, requests: Sequence[Request]) -> None:
        engine = self.engine if self._running.is_set() else self._any_engine()  # a paused engine may be loading weights
        for request in requests:
            engine.add(request)

    async def results(self) -> list[Completion]:
        while not self._finished:
            if not self._running.is_set():
                await self._while_paused()
                continue
            if not self.engine.has_work:
                break
            self._finished.extend(self.engine.step())
            await asyncio.sleep(0)
        finished, self._finished = self._finished, []
        return finished

    async def _while_paused(self) -> None:
        """Waits until generation resumes or the polling interval has passed."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._running.wait(), _PAUSE_S)

    def progress(self, reported: Mapping[str, int]) -> list[Progress]:
        return self._engine.progress(reported) if self._engine is not None else []

    def abort(self, ids: Sequence[str]) -> None:
        for id in ids:
            completion = self._any_engine().abort(id)
            if completion is not None:
                self._finished.append(completion)

    async def pause(self) -> None:
        self._running.clear()
        if self._engine is not None:
            self._engine.settle()

    async def resume(self) -> None:
        self._running.set()

    def _any_engine(self) -> SlotEngine | PagedEngine:
        """The engine, even if its weights are not verified."""
        return self.engine if self._engine is None else self._engine

    async def load_weights(self, weights: Weights) -> None:
        assert self._own_model is None, "an engine with a model of its own receives weights"
        check_shared(weights, weights.model if self._engine is None else self._engine.model)
        engine = self._engine or self._make_engine(weights.model, weights.version)
        self._verified = False  # the storage holds other values from here on
        self._serve(engine, weights)

    def begin_loading(self, manifest: WeightManifest) -> Mapping[str, Tensor]:
        self._verified = False
        if self._own_model is None:
            assert self._make_model is not None, "an engine without a model of its own uses the trainer's"
            self._own_model = self._make_model()
            self._offloader = TensorOffloader(self._own_model.device)
        return named_tensors(self._own_model)

    async def end_loading(self, manifest: WeightManifest) -> None:
        assert self._own_model is not None
        self._serve(self._engine or self._make_engine(self._own_model, manifest.version), manifest)

    def _serve(self, engine: SlotEngine | PagedEngine, weights: Weights | WeightManifest) -> None:
        check_probe(weights, engine.log_probs_of(weights.probe.numpy()))
        engine.set_version(weights.version)
        self._engine, self._verified = engine, True

    def _make_engine(self, model: PreTrainedModel, version: int) -> SlotEngine | PagedEngine:
        return make_engine(
            model,
            self._tokenizer,
            max_running=self._max_running,
            exact=self._exact,
            kv_tokens=self._kv_tokens,
            version=version,
            records_routes=self._records_routes,
        )

    async def set_residency(self, level: Residency) -> None:
        if level != "all" and self._engine is not None:
            self._engine.release()
        if self._own_model is not None and self._offloader is not None:
            weights = dict(self._own_model.named_parameters())
            if level == "none":
                self._offloader.offload(weights)
            else:
                self._offloader.onload(weights)

    def stats(self) -> EngineStats:
        return self.engine.stats()

    async def close(self) -> None:
        """There is nothing to end: the engine is part of this process."""
