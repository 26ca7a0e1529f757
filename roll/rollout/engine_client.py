"""The door to the engines: requests go in one by one, completions come out, and both travel in batches.

What always holds: every request that was accepted ends in one completion, or in the error of the engine it was on; when
an engine is lost, what it had said of a request until then is not.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from roll.cluster import Cluster
from roll.cluster.batched_channel import BatchedChannel
from roll.cluster.errors import RemoteError
from roll.data.routes import Routes
from roll.data.tokenlog import FloatArray, IntArray
from roll.engine.request import Completion, Progress, Request
from roll.workers.infer import InferWorker, OutputBatch, Rejection


class RequestRejected(ValueError):
    """The engine can never run the request."""


@dataclass
class PartialResponse:
    """Tokens of a response, as far as it has come, in pieces."""

    pieces: list[Progress | Completion] = field(default_factory=list)
    tokens: int = 0
    recorded: list[Routes] = field(default_factory=list)
    """Rows that engines have recorded, each from where the one before ends."""

    def add(self, piece: Progress | Completion) -> None:
        if isinstance(piece, Completion) and piece.routes is not None:
            self.recorded.append(piece.routes)
        if len(piece.ids):
            self.pieces.append(piece)
            self.tokens += len(piece.ids)

    def extend(self, other: PartialResponse) -> None:
        self.pieces.extend(other.pieces)
        self.tokens += other.tokens
        self.recorded.extend(other.recorded)

    def after(self, ids: IntArray) -> IntArray:
        """These tokens and then the drawn ones."""
        return _joined([ids, *(piece.ids for piece in self.pieces)], np.int32)

    @property
    def ids(self) -> IntArray:
        return _joined([piece.ids for piece in self.pieces], np.int32)

    @property
    def logprobs(self) -> FloatArray:
        return _joined([piece.logprobs for piece in self.pieces], np.float32)

    @property
    def versions(self) -> IntArray:
        return _joined([piece.versions for piece in self.pieces], np.int32)

    @property
    def routed(self) -> int:
        """Tokens of which routes are recorded."""
        return sum(map(len, self.recorded))

    @property
    def routes(self) -> Routes | None:
        return _joined(self.recorded, np.uint8) if self.recorded else None


class EngineDied(Exception):
    """The engine of a request is gone. `drawn` is what it had said of it."""

    def __init__(self, cause: RemoteError, drawn: PartialResponse) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.drawn = drawn


Watch = Callable[[PartialResponse], bool]
"""Sees what a request has drawn so far; True ends it."""


@dataclass
class _Waiting:
    request: Request
    answer: asyncio.Future[Completion]
    engine: int
    watch: Watch | None = None
    drawn: PartialResponse = field(default_factory=PartialResponse)
    over: bool = False
    """The engine has said all it will of this request."""
    ending: bool = False


class EngineClient:
    def __init__(self, engines: Cluster[InferWorker], client: str) -> None:
        """`client` tells this door's requests from those of others."""
        self._engines = engines
        self._client = client
        self._waiting: dict[str, _Waiting] = {}
        self._forsaken: list[Counter[str]] = [Counter() for _ in range(len(engines))]
        """Completions still to come from each engine that nobody waits for: of requests that were cancelled. They come
        before those of a later try with the same id."""
        self._count = [0] * len(engines)
        """Requests that wait for each engine."""
        self._lines = [self._line(engine) for engine in range(len(engines))]
        self._ending: dict[str, asyncio.Task[None]] = {}
        """Requests whose end is on its way to their engine."""

    def reconnect(self, engines: Cluster[InferWorker]) -> None:
        """The engines as they are now: some may have been started again."""
        self._engines = engines

    async def generate(self, request: Request, engine: int, watch: Watch | None = None) -> Completion:
        """Generates one response. Cancelling it, a deadline say, ends the request on its engine too."""
        if request.id in self._waiting:
            raise ValueError(f"request {request.id!r} is being generated already")
        if (ending := self._ending.get(request.id)) is not None:  # it would meet this one
            await asyncio.wait([ending])  # waits: it is a call, which has a deadline
        waiting = _Waiting(request, asyncio.get_running_loop().create_future(), engine, watch)
        self._waiting[request.id] = waiting
        self._count[engine] += 1
        try:
            self._lines[engine].post(request)
            # waits: the runner has a deadline for every response
            return await waiting.answer
        except asyncio.CancelledError:
            if not self._lines[engine].take_back(request):
                if not waiting.over:
                    self._forsaken[engine][request.id] += 1
                await asyncio.shield(self._ended(engine, [request.id]))  # also if it is cancelled again
            raise
        finally:
            del self._waiting[request.id]
            self._count[engine] -= 1

    def has(self, id: str) -> bool:
        """Whether a request is being generated."""
        return id in self._waiting

    def end(self, ids: Sequence[str]) -> None:
        """Ends requests with what they have: their completions come as `abort`. Those not here are left alone."""
        by_engine: dict[int, list[str]] = {}
        for id in ids:
            waiting = self._waiting.get(id)
            if waiting is None or waiting.ending or waiting.over:
                continue
            waiting.ending = True
            if self._lines[waiting.engine].take_back(waiting.request):
                waiting.over = True
                if not waiting.answer.done():
                    waiting.answer.set_result(_nothing_drawn(id))
            else:
                by_engine.setdefault(waiting.engine, []).append(id)
        for engine, some in by_engine.items():
            self._ended(engine, some)

    def _ended(self, engine: int, ids: list[str]) -> asyncio.Task[None]:
        """Ends requests on their engine, whoever waits for it."""
        task = asyncio.create_task(self._end(engine, ids))
        self._ending.update(dict.fromkeys(ids, task))

        def forget(_: object) -> None:
            for id in ids:
                if self._ending.get(id) is task:
                    del self._ending[id]

        task.add_done_callback(forget)
        return task

    async def _end(self, engine: int, ids: list[str]) -> None:
        await self._lines[engine].arrived()
        await self._abort(engine, ids)

    async def _abort(self, engine: int, ids: Sequence[str]) -> None:
        try:
            await self._engines.call_rank(engine, InferWorker.abort, ids)
        except RemoteError as error:  # nothing runs on an engine that is gone
            self._fail(engine, error)

    def _line(self, engine: int) -> BatchedChannel[Request, OutputBatch]:
        async def send(requests: list[Request]) -> None:
            self._refused(engine, await self._engines.call_rank(engine, InferWorker.submit, self._client, requests))

        async def ask() -> OutputBatch:
            return await self._engines.call_rank(engine, InferWorker.results, self._client)

        return BatchedChannel(
            send,
            ask,
            take=lambda news: self._take(engine, news),
            fail=lambda error: self._fail(engine, error),
            busy=lambda: self._busy(engine),
        )

    def _busy(self, engine: int) -> bool:
        return self._count[engine] > 0

    def _take(self, engine: int, news: OutputBatch) -> None:
        for progress in news.progress:
            self._heard(engine, progress)
        for completion in news.completions:
            if (answer := self._answer_to(engine, completion.id)) is not None:
                answer.set_result(completion)

    def _heard(self, engine: int, progress: Progress) -> None:
        waiting = self._waiting.get(progress.id)
        if waiting is None or waiting.engine != engine or self._forsaken[engine][progress.id]:
            return
        if progress.start == waiting.drawn.tokens:
            waiting.drawn.add(progress)
            if waiting.watch is not None and not waiting.ending and waiting.watch(waiting.drawn):
                self.end([progress.id])

    def _refused(self, engine: int, refusals: Sequence[Rejection]) -> None:
        for refusal in refusals:
            if (answer := self._answer_to(engine, refusal.id)) is not None:
                answer.set_exception(RequestRejected(refusal.reason))

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
                    lost = EngineDied(error, waiting.drawn) if isinstance(error, RemoteError) else error
                    waiting.answer.set_exception(lost)


def _nothing_drawn(id: str) -> Completion:
    none = np.zeros(0, np.int32)
    return Completion(id, none, np.zeros(0, np.float32), none, "abort")


def _joined(parts: list[IntArray] | list[FloatArray] | list[Routes], dtype: type) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
