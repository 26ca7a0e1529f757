"""The router: one door to all engines.

A request goes to the engine with the fewest tokens still to come. What always holds: every request that was accepted ends
in one completion, or in the error of the engine it was on.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from roll.cluster import Cluster
from roll.engine.request import Completion, Request
from roll.workers.infer import InferWorker


@dataclass
class _Waiting:
    request: Request
    answer: asyncio.Future[Completion]
    engine: int

    @property
    def tokens(self) -> int:
        return len(self.request.ids) + self.request.sampling.max_new_tokens


class Router:
    def __init__(self, engines: Cluster[InferWorker]) -> None:
        self._engines = engines
        self._waiting: dict[str, _Waiting] = {}
        self._loads = [0] * len(engines)
        """Tokens that may be needed on each engine for what waits there."""
        self._forsaken: Counter[str] = Counter()
        """Completions still to come that nobody waits for: of requests that were cancelled. They come before those of a
        later try with the same id."""
        self._collectors: dict[int, asyncio.Task[None]] = {}

    async def generate(self, request: Request) -> Completion:
        """Generates one response. Cancelling it, a deadline say, ends the request on its engine too."""
        if request.id in self._waiting:
            raise ValueError(f"request {request.id!r} is being generated already")
        engine = self._loads.index(min(self._loads))
        waiting = _Waiting(request, asyncio.get_running_loop().create_future(), engine)
        self._waiting[request.id] = waiting
        self._loads[engine] += waiting.tokens
        try:
            await self._engines.call_rank(engine, InferWorker.submit, [request])
            self._collect_from(engine)
            return await waiting.answer
        except asyncio.CancelledError:
            if not waiting.answer.done() or waiting.answer.cancelled():
                self._forsaken[request.id] += 1
            await self._engines.call_rank(engine, InferWorker.abort, [request.id])
            raise
        finally:
            del self._waiting[request.id]
            self._loads[engine] -= waiting.tokens

    def _collect_from(self, engine: int) -> None:
        task = self._collectors.get(engine)
        if task is None or task.done():
            self._collectors[engine] = asyncio.create_task(self._collector(engine))

    async def _collector(self, engine: int) -> None:
        """Hands out an engine's results while anything waits for it."""
        try:
            while any(w.engine == engine and not w.answer.done() for w in self._waiting.values()):
                for completion in await self._engines.call_rank(engine, InferWorker.results):
                    waiting = self._waiting.get(completion.id)
                    if self._forsaken[completion.id]:
                        self._forsaken[completion.id] -= 1
                    elif waiting is not None and not waiting.answer.done():
                        waiting.answer.set_result(completion)
                await asyncio.sleep(0)
        except Exception as error:
            for waiting in self._waiting.values():
                if waiting.engine == engine and not waiting.answer.done():
                    waiting.answer.set_exception(error)
