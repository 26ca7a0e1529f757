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


@dataclass
class _Waiting:
    answer: asyncio.Future[Completion]
    engine: int
    over: bool = False
    """The engine has said all it will of this request."""


class EngineDoor:
    def __init__(self, engines: Cluster[InferWorker], client: str) -> None:
        """`client` tells this door's requests from those of others."""
        self._engines = engines
        self._client = client
        self._waiting: dict[str, _Waiting] = {}
        self._forsaken: list[Counter[str]] = [Counter() for _ in range(len(engines))]
        """Completions still to come from each engine that nobody waits for: of requests that were cancelled. They come
        before those of a later try with the same id."""
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
            if not self._lines[engine].take_back(request):
                if not waiting.over:
                    self._forsaken[engine][request.id] += 1
                await self._lines[engine].arrived()
                await self._engines.call_rank(engine, InferWorker.abort, [request.id])
            raise
        finally:
            del self._waiting[request.id]

    def _line(self, engine: int) -> Line[Request, list[Completion]]:
        async def send(requests: list[Request]) -> None:
            self._refused(engine, await self._engines.call_rank(engine, InferWorker.submit, self._client, requests))

        async def ask() -> list[Completion]:
            return await self._engines.call_rank(engine, InferWorker.results, self._client)

        return Line(
            send,
            ask,
            take=lambda completions: self._take(engine, completions),
            fail=lambda error: self._fail(engine, error),
            busy=lambda: self._busy(engine),
        )

    def _busy(self, engine: int) -> bool:
        return any(w.engine == engine and not w.answer.done() for w in self._waiting.values())

    def _take(self, engine: int, completions: Sequence[Completion]) -> None:
        for completion in completions:
            if (answer := self._answer_to(engine, completion.id)) is not None:
                answer.set_result(completion)

    def _refused(self, engine: int, refusals: Sequence[Refusal]) -> None:
        for refusal in refusals:
            if (answer := self._answer_to(engine, refusal.id)) is not None:
                answer.set_exception(RequestRefused(refusal.reason))

    def _answer_to(self, engine: int, id: str) -> asyncio.Future[Completion] | None:
        """Who waits for what an engine now says of a request; None if nobody does any more."""
        forsaken = self._forsaken[engine]
        if forsaken[id]:
            forsaken[id] -= 1
            return None
        waiting = self._waiting.get(id)
        if waiting is None or waiting.over:
            return None
        waiting.over = True
        return None if waiting.answer.done() else waiting.answer

    def _fail(self, engine: int, error: Exception) -> None:
        self._forsaken[engine].clear()
        for waiting in self._waiting.values():
            if waiting.engine == engine and not waiting.over:
                waiting.over = True
                if not waiting.answer.done():
                    waiting.answer.set_exception(error)
