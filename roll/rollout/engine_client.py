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

    def __init__(self, cause: RemoteError, partial: PartialResponse) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.partial = partial


Watch = Callable[[PartialResponse], bool]
"""Called with the response so far after each progress message; returning True ends the request."""


@dataclass
class _PendingRequest:
    request: Request
    result: asyncio.Future[Completion]
    engine: int
    watch: Watch | None = None
    partial: PartialResponse = field(default_factory=PartialResponse)
    is_over: bool = False
    """No more output of the engine counts for this request: it has completed, was rejected, or its engine died."""
    is_ending: bool = False


class EngineClient:
    def __init__(self, engines: Cluster[InferWorker], client: str) -> None:
        """`client`: unique name under which the engines keep this client's outputs."""
        self._engines = engines
        self._client = client
        self._pending: dict[str, _PendingRequest] = {}
        self._to_discard: list[Counter[str]] = [Counter() for _ in range(len(engines))]
        """Per engine: completions of cancelled requests that are still to come and must be discarded. They arrive before
        the completion of a later request with the same id."""
        self._in_flight = [0] * len(engines)
        """In-flight requests per engine."""
        self._channels = [self._channel(engine) for engine in range(len(engines))]
        self._aborting: dict[str, asyncio.Task[None]] = {}
        """By request id: the task that is aborting it on its engine."""

    def reconnect(self, engines: Cluster[InferWorker]) -> None:
        """Replaces the engines' cluster after some engines were restarted."""
        self._engines = engines

    async def generate(self, request: Request, engine: int, watch: Watch | None = None) -> Completion:
        """Generates one response. Cancelling this coroutine, for example by a deadline, aborts the request on its engine
        too."""
        if request.id in self._pending:
            raise ValueError(f"request {request.id!r} is being generated already")
        if (aborting := self._aborting.get(request.id)) is not None:  # its abort would hit this request
            await asyncio.wait([aborting])  # waits: it is a call, which has a deadline
        pending = _PendingRequest(request, asyncio.get_running_loop().create_future(), engine, watch)
        self._pending[request.id] = pending
        self._in_flight[engine] += 1
        try:
            self._channels[engine].post(request)
            # waits: the runner has a deadline for every response
            return await pending.result
        except asyncio.CancelledError:
            if not self._channels[engine].remove(request):
                if not pending.is_over:
                    self._to_discard[engine][request.id] += 1
                # waits: it is a call, which has a deadline. It goes on if this coroutine is cancelled again.
                await asyncio.shield(self._start_abort(engine, [request.id]))
            raise
        finally:
            del self._pending[request.id]
            self._in_flight[engine] -= 1

    def has(self, id: str) -> bool:
        """Whether a request is in flight."""
        return id in self._pending

    def end(self, ids: Sequence[str]) -> None:
        """Ends requests early: their completions have the tokens so far and finish `abort`. Unknown ids are ignored."""
        by_engine: dict[int, list[str]] = {}
        for id in ids:
            pending = self._pending.get(id)
            if pending is None or pending.is_ending or pending.is_over:
                continue
            pending.is_ending = True
            if self._channels[pending.engine].remove(pending.request):
                pending.is_over = True
                if not pending.result.done():
                    pending.result.set_result(_nothing_sampled(id))
            else:
                by_engine.setdefault(pending.engine, []).append(id)
        for engine, aborted in by_engine.items():
            self._start_abort(engine, aborted)

    def _start_abort(self, engine: int, ids: list[str]) -> asyncio.Task[None]:
        """Starts a task that aborts requests on their engine, and returns it."""
        task = asyncio.create_task(self._abort_once_sent(engine, ids))
        self._aborting.update(dict.fromkeys(ids, task))

        def remove(_: object) -> None:
            for id in ids:
                if self._aborting.get(id) is task:
                    del self._aborting[id]

        task.add_done_callback(remove)
        return task

    async def _abort_once_sent(self, engine: int, ids: list[str]) -> None:
        await self._channels[engine].wait_sent()
        await self._abort(engine, ids)

    async def _abort(self, engine: int, ids: Sequence[str]) -> None:
        try:
            await self._engines.call_rank(engine, InferWorker.abort, ids)
        except RemoteError as error:  # the engine died, and all of its requests with it
            self._fail(engine, error)

    def _channel(self, engine: int) -> BatchedChannel[Request, OutputBatch]:
        async def send(requests: list[Request]) -> None:
            self._reject(engine, await self._engines.call_rank(engine, InferWorker.submit, self._client, requests))

        async def poll() -> OutputBatch:
            return await self._engines.call_rank(engine, InferWorker.results, self._client)

        return BatchedChannel(
            send,
            poll,
            on_result=lambda outputs: self._apply_outputs(engine, outputs),
            on_error=lambda error: self._fail(engine, error),
            busy=lambda: self._busy(engine),
        )

    def _busy(self, engine: int) -> bool:
        return self._in_flight[engine] > 0

    def _apply_outputs(self, engine: int, outputs: OutputBatch) -> None:
        for progress in outputs.progress:
            self._add_progress(engine, progress)
        for completion in outputs.completions:
            if (result := self._claim_result(engine, completion.id)) is not None:
                result.set_result(completion)

    def _add_progress(self, engine: int, progress: Progress) -> None:
        pending = self._pending.get(progress.id)
        if pending is None or pending.engine != engine or self._to_discard[engine][progress.id]:
            return
        if progress.start == pending.partial.tokens:
            pending.partial.add(progress)
            if pending.watch is not None and not pending.is_ending and pending.watch(pending.partial):
                self.end([progress.id])

    def _reject(self, engine: int, rejections: Sequence[Rejection]) -> None:
        for rejection in rejections:
            if (result := self._claim_result(engine, rejection.id)) is not None:
                result.set_exception(RequestRejected(rejection.reason))

    def _claim_result(self, engine: int, id: str) -> asyncio.Future[Completion] | None:
        """The future that a completion or rejection resolves; None if its request was cancelled or is over."""
        to_discard = self._to_discard[engine]
        if to_discard[id]:
            to_discard[id] -= 1
            return None
        pending = self._pending.get(id)
        if pending is None or pending.is_over:
            return None
        pending.is_over = True
        return None if pending.result.done() else pending.result

    def _fail(self, engine: int, error: Exception) -> None:
        self._to_discard[engine].clear()
        for pending in self._pending.values():
            if pending.engine == engine and not pending.is_over:
                pending.is_over = True
                if not pending.result.done():
                    failure = EngineDied(error, pending.partial) if isinstance(error, RemoteError) else error
                    pending.result.set_exception(failure)


def _nothing_sampled(id: str) -> Completion:
    none = np.zeros(0, np.int32)
    return Completion(id, none, np.zeros(0, np.float32), none, "abort")


def _joined(parts: list[IntArray] | list[FloatArray] | list[Routes], dtype: type) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
