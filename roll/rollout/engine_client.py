"""The engine client: accepts requests one by one, returns completions, and sends and receives both in batches.

Invariants: every accepted request ends in one completion, or in the error of its engine; if an engine dies, the tokens it
had already streamed for a request are kept.
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
    """The tokens of a response so far, in the pieces that engines sent."""

    pieces: list[Progress | Completion] = field(default_factory=list)
    tokens: int = 0
    recorded: list[Routes] = field(default_factory=list)
    """Expert routes recorded by the engines; each piece starts where the previous one ends."""

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
        """`ids` followed by the tokens of this response."""
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
        """Number of tokens with recorded routes."""
        return sum(map(len, self.recorded))

    @property
    def routes(self) -> Routes | None:
        return _joined(self.recorded, np.uint8) if self.recorded else None


class EngineDied(Exception):
    """The engine of a request died. `partial` has the tokens that it had streamed."""

    def __init__(self, cause: RemoteError, drawn: PartialResponse) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.partial = drawn


Watch = Callable[[PartialResponse], bool]
"""Called with the response so far after each progress message; returning True ends the request."""


@dataclass
class _Waiting:
    request: Request
    answer: asyncio.Future[Completion]
    engine: int
    watch: Watch | None = None
    partial: PartialResponse = field(default_factory=PartialResponse)
    over: bool = False
    """No more output of the engine counts for this request: it has completed, was rejected, or its engine died."""
    ending: bool = False


class EngineClient:
    def __init__(self, engines: Cluster[InferWorker], client: str) -> None:
        """`client`: unique name under which the engines keep this client's outputs."""
        self._engines = engines
        self._client = client
        self._waiting: dict[str, _Waiting] = {}
        self._forsaken: list[Counter[str]] = [Counter() for _ in range(len(engines))]
        """Per engine: completions of cancelled requests that are still to come and must be discarded. They arrive before
        the completion of a later request with the same id."""
        self._count = [0] * len(engines)
        """In-flight requests per engine."""
        self._channels = [self._channel(engine) for engine in range(len(engines))]
        self._ending: dict[str, asyncio.Task[None]] = {}
        """By request id: the task that is aborting it on its engine."""

    def reconnect(self, engines: Cluster[InferWorker]) -> None:
        """Replaces the engines' cluster after some engines were restarted."""
        self._engines = engines

    async def generate(self, request: Request, engine: int, watch: Watch | None = None) -> Completion:
        """Generates one response. Cancelling this coroutine, for example by a deadline, aborts the request on its engine
        too."""
        if request.id in self._waiting:
            raise ValueError(f"request {request.id!r} is being generated already")
        if (ending := self._ending.get(request.id)) is not None:  # its abort would hit this request
            await asyncio.wait([ending])  # waits: it is a call, which has a deadline
        waiting = _Waiting(request, asyncio.get_running_loop().create_future(), engine, watch)
        self._waiting[request.id] = waiting
        self._count[engine] += 1
        try:
            self._channels[engine].post(request)
            # waits: the runner has a deadline for every response
            return await waiting.answer
        except asyncio.CancelledError:
            if not self._channels[engine].take_back(request):
                if not waiting.over:
                    self._forsaken[engine][request.id] += 1
                await asyncio.shield(self._ended(engine, [request.id]))  # also if it is cancelled again
            raise
        finally:
            del self._waiting[request.id]
            self._count[engine] -= 1

    def has(self, id: str) -> bool:
        """Whether a request is in flight."""
        return id in self._waiting

    def end(self, ids: Sequence[str]) -> None:
        """Ends requests early: their completions have the tokens so far and finish `abort`. Unknown ids are ignored."""
        by_engine: dict[int, list[str]] = {}
        for id in ids:
            waiting = self._waiting.get(id)
            if waiting is None or waiting.ending or waiting.over:
                continue
            waiting.ending = True
            if self._channels[waiting.engine].take_back(waiting.request):
                waiting.over = True
                if not waiting.answer.done():
                    waiting.answer.set_result(_nothing_sampled(id))
            else:
                by_engine.setdefault(waiting.engine, []).append(id)
        for engine, some in by_engine.items():
            self._ended(engine, some)

    def _ended(self, engine: int, ids: list[str]) -> asyncio.Task[None]:
        """Starts a task that aborts requests on their engine, and returns it."""
        task = asyncio.create_task(self._end(engine, ids))
        self._ending.update(dict.fromkeys(ids, task))

        def forget(_: object) -> None:
            for id in ids:
                if self._ending.get(id) is task:
                    del self._ending[id]

        task.add_done_callback(forget)
        return task

    async def _end(self, engine: int, ids: list[str]) -> None:
        await self._channels[engine].arrived()
        await self._abort(engine, ids)

    async def _abort(self, engine: int, ids: Sequence[str]) -> None:
        try:
            await self._engines.call_rank(engine, InferWorker.abort, ids)
        except RemoteError as error:  # the engine died, and all of its requests with it
            self._fail(engine, error)

    def _channel(self, engine: int) -> BatchedChannel[Request, OutputBatch]:
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
            self._received(engine, progress)
        for completion in news.completions:
            if (answer := self._answer_to(engine, completion.id)) is not None:
                answer.set_result(completion)

    def _received(self, engine: int, progress: Progress) -> None:
        waiting = self._waiting.get(progress.id)
        if waiting is None or waiting.engine != engine or self._forsaken[engine][progress.id]:
            return
        if progress.start == waiting.partial.tokens:
            waiting.partial.add(progress)
            if waiting.watch is not None and not waiting.ending and waiting.watch(waiting.partial):
                self.end([progress.id])

    def _refused(self, engine: int, refusals: Sequence[Rejection]) -> None:
        for refusal in refusals:
            if (answer := self._answer_to(engine, refusal.id)) is not None:
                answer.set_exception(RequestRejected(refusal.reason))

    def _answer_to(self, engine: int, id: str) -> asyncio.Future[Completion] | None:
        """The future that a completion or rejection resolves; None if its request was cancelled or is over."""
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
                    lost = EngineDied(error, waiting.partial) if isinstance(error, RemoteError) else error
                    waiting.answer.set_exception(lost)


def _nothing_sampled(id: str) -> Completion:
    none = np.zeros(0, np.int32)
    return Completion(id, none, np.zeros(0, np.float32), none, "abort")


def _joined(parts: list[IntArray] | list[FloatArray] | list[Routes], dtype: type) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
