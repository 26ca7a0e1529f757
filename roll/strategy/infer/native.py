"""The embedded engine as an inference strategy, in the controller's event loop.

What always holds: nothing is generated before weights were loaded and verified; every submitted request ends in exactly
one completion; the engine steps only while somebody waits for results, and lets other coroutines run between steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase as Tokenizer

from roll.config.errors import RunError
from roll.engine.engine import Engine, EngineStats
from roll.engine.request import Completion, Request
from roll.transfer.weights import Weights, check_probe, check_shared


class NativeStrategy:
    def __init__(self, tokenizer: Tokenizer, *, max_running: int, exact: bool) -> None:
        self._tokenizer = tokenizer
        self._max_running = max_running
        self._exact = exact
        self._engine: Engine | None = None
        self._verified = False
        self._finished: list[Completion] = []
        self._running = asyncio.Event()
        self._running.set()

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise RunError("the engine has no weights yet: publish a version before generating")
        if not self._verified:
            raise RunError(f"the engine's weights after version {self._engine.version} were refused: publish again")
        return self._engine

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.engine.add(request)

    async def results(self) -> list[Completion]:
        while not self._finished and self.engine.has_work:
            await self._running.wait()
            self._finished.extend(self.engine.step())
            await asyncio.sleep(0)
        finished, self._finished = self._finished, []
        return finished

    def abort(self, ids: Sequence[str]) -> None:
        for id in ids:
            completion = self.engine.abort(id)
            if completion is not None:
                self._finished.append(completion)

    def pause(self) -> None:
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    def load_weights(self, weights: Weights) -> None:
        engine = self._engine or Engine(
            weights.model,
            self._tokenizer,
            max_running=self._max_running,
            exact=self._exact,
            version=weights.version,
        )
        check_shared(weights, engine.model)
        self._verified = False  # the storage holds other values from here on
        check_probe(weights, engine.log_probs_of(weights.probe.numpy()))
        engine.set_version(weights.version)
        self._engine, self._verified = engine, True

    def sleep(self) -> None:
        self.engine.release()

    def wake(self) -> None:
        """The cache comes back with the next request."""

    def stats(self) -> EngineStats:
        return self.engine.stats()
