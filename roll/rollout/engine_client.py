"""The engine client: a rollout worker's requests to the engines.

Invariants: every accepted request ends in one completion, or in the error of its engine; if an engine dies, the tokens it
had already streamed for a request are kept.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from roll.cluster import Cluster
from roll.cluster.errors import RemoteError
from roll.data.routes import Routes
from roll.data.tokenlog import FloatArray, IntArray
from roll.engine.request import Completion, Progress, Request
from roll.workers.infer import InferWorker


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


@dataclass(eq=False)
class _PendingRequest:
    engine: int
    key: str
    """The engine's key of this call."""
    partial: PartialResponse = field(default_factory=PartialResponse)
    is_ending: bool = False
    error: Exception | None = None
    """What the watch raised."""


class EngineClient:
    def __init__(self, engines: Cluster[InferWorker], client: str) -> None:
        """`client`: unique name of this client. The engines abort its requests by it when the client has died."""
        self._engines = engines
        self._client = client
        self._pending: dict[str, _PendingRequest] = {}
        self._numbers = itertools.count()
        self._aborts: set[asyncio.Task[None]] = set()

    def reconnect(self, engines: Cluster[InferWorker]) -> None:
        """Replaces the engines' cluster after some engines were restarted."""
        self._engines = engines

    async def generate(self, request: Request, engine: int, watch: Watch | None = None) -> Completion:
        """Generates one response. Cancelling this coroutine, for example by a deadline, aborts the request on its engine
        too."""
        if request.id in self._pending:
            raise ValueError(f"request {request.id!r} is being generated already")
        pending = _PendingRequest(engine, f"{self._client}#{next(self._numbers)}")
        self._pending[request.id] = pending

        def add_progress(progress: Progress) -> None:
            pending.partial.add(progress)
            if watch is not None and not pending.is_ending and self._ends(pending, watch):
                self.end([request.id])

        try:
            # waits: the runner has a deadline for every response
            completion = await self._engines.stream_rank(engine, InferWorker.generate, add_progress, pending.key, request)
        except RemoteError as error:
            raise EngineDied(error, pending.partial) from error
        finally:
            del self._pending[request.id]
        if pending.error is not None:
            raise pending.error
        return completion

    @staticmethod
    def _ends(pending: _PendingRequest, watch: Watch) -> bool:
        """Whether to end the request: the watch says so, or it raised, and `generate` raises its error after the end."""
        try:
            return watch(pending.partial)
        except Exception as error:
            pending.error = error
            return True

    def has(self, id: str) -> bool:
        """Whether a request is in flight."""
        return id in self._pending

    def end(self, ids: Sequence[str]) -> None:
        """Ends requests early: their completions have the tokens so far and finish `abort`. Unknown ids are ignored."""
        by_engine: dict[int, list[str]] = {}
        for id in ids:
            pending = self._pending.get(id)
            if pending is not None and not pending.is_ending:
                pending.is_ending = True
                by_engine.setdefault(pending.engine, []).append(pending.key)
        for engine, keys in by_engine.items():
            task = asyncio.create_task(self._abort(engine, keys))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _abort(self, engine: int, keys: Sequence[str]) -> None:
        with suppress(RemoteError):  # the engine died: its requests raise the error
            await self._engines.call_rank(engine, InferWorker.abort, keys)


def _joined(parts: list[IntArray] | list[FloatArray] | list[Routes], dtype: type) -> np.ndarray:
    """The parts one after the other; a single part is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
