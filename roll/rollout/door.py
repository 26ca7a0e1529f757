"""The door to the engines: requests go in one by one, completions come out, and both travel in batches.

What always holds: every request that was accepted ends in one completion, or in the error of the engine it was on.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from roll.cluster import Cluster
from roll.cluster.line import Line
from roll.engine.request import Completion, Request
from roll.workers.infer import InferWorker, Refusal


class RequestRefused(ValueError):
    """The engine can never run the request."""


@dataclass(frozen=True)
class _Waiting:
    answer: asyncio.Future[Completion]
    engine: int


class EngineDoor:
    def __init__(self, engines: Cluster[InferWorker], client: str) -> None:
        """`client` tells this door's requests from those of others."""
        self._engines = engines
        self._client = client
        self._waiting: dict[str, _Waiting] = {}
        self._forsaken: Counter[str] = Counter()
        """Completions still to come that nobody waits for: of requests that were cancelled. They come before those of a
        later try with the same id."""
        self._lines = [self._line(engine) for engine in range(len(engines))]

    async def generate(self, request: Request, engine: int) -> Completion:
        """Generates one response. Cancelling it, a deadline say, ends the request on its engine too."""
        if request.id in self._waiting:
            raise ValueError(f"request {request.id!r} is being generated already")
        waiting = _Waiting(asyncio.get_running_loop().create_future(), engine)
        self._waiting[request.id] = waiting
        try:
            self._lines[engine].post(request)
            return await waiting.answer
        except asyncio.CancelledError:
            if not waiting.answer.done() or waiting.answer.cancelled():
                self._forsaken[request.id] += 1
            await self._engines.call_rank(engine, InferWorker.abort, [request.id])
            raise
        finally:
            del self._waiting[request.id]

    def _line(self, engine: int) -> Line[Request, list[Completion]]:
        async def send(requests: list[Request]) -> None:
            self._refused(await self._engines.call_rank(engine, InferWorker.submit, self._client, requests))

        async def ask() -> list[Completion]:
            return await self._engines.call_rank(engine, InferWorker.results, self._client)

        return Line(
            send, ask, take=self._take, fail=lambda error: self._fail(engine, error), busy=lambda: self._busy(engine)
        )

    def _busy(self, engine: int) -> bool:
        return any(w.engine == engine and not w.answer.done() for w in self._waiting.values())

    def _take(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            waiting = self._waiting.get(completion.id)
            if self._forsaken[completion.id]:
                self._forsaken[completion.id] -= 1
            elif waiting is not None and not waiting.answer.done():
                waiting.answer.set_result(completion)

    def _refused(self, refusals: Sequence[Refusal]) -> None:
        for refusal in refusals:
            waiting = self._waiting.get(refusal.id)
            if waiting is not None and not waiting.answer.done():
                waiting.answer.set_exception(RequestRefused(refusal.reason))

    def _fail(self, engine: int, error: Exception) -> None:
        for waiting in self._waiting.values():
            if waiting.engine == engine and not waiting.answer.done():
                waiting.answer.set_exception(error)
