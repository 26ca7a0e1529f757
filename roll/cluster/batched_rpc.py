"""Batched RPC: hundreds of concurrent calls to one worker in another process share messages, and so do their results.

A message to another process costs most of a millisecond, whatever its size. Here a call is a number and bytes; calls made
while a batch is in flight wait for the next batch (`batched_channel.py`).

Invariants: every call ends in its own result, or in the error that ended the worker; calls start on the worker in the
order they were made; the result of a cancelled call is discarded, and a cancelled call that was not sent yet never is; a
batch in flight delays other calls by not much more than the deadline.
"""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from roll.cluster.batched_channel import BatchedChannel
from roll.cluster.errors import CallTimedOut

T = TypeVar("T")

POLL_S = 5.0
"""How long `BatchedServer.answers` waits before it returns an empty list."""

Packed = tuple[int, bytes]
"""A call or its result: the number of the call, and the serialized content."""


class BatchedClient:
    """The caller's side."""

    def __init__(
        self,
        worker: str,
        post: Callable[[str, list[Packed]], Awaitable[None]],
        answers: Callable[[str], Awaitable[list[Packed]]],
        deadline_s: float,
    ) -> None:
        """`post` and `answers` call the methods of the worker's `BatchedServer`. If one of them raises, or takes longer
        than the deadline (not counting the server's own `POLL_S`), all in-flight calls fail with that error."""
        client = uuid.uuid4().hex
        self._worker = worker
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._number = 0
        self._channel: BatchedChannel[Packed, list[Packed]] = BatchedChannel(
            lambda calls: self._in_time(post(client, calls), "a batch of calls", deadline_s),
            lambda: self._in_time(answers(client), "a poll for results", POLL_S + deadline_s),
            on_result=self._take,
            on_error=self._fail,
            busy=lambda: bool(self._waiting),
        )

    async def call(self, packed: bytes) -> bytes:
        self._number += 1
        call = (self._number, packed)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[call[0]] = answer
        self._channel.post(call)
        try:
            # waits: `Cluster` bounds every call
            return await answer
        except asyncio.CancelledError:
            self._channel.remove(call)
            raise
        finally:
            del self._waiting[call[0]]

    async def _in_time(self, trip: Awaitable[T], what: str, deadline_s: float) -> T:
        try:
            async with asyncio.timeout(deadline_s):
                return await trip
        except TimeoutError:
            raise CallTimedOut(self._worker, what, deadline_s) from None

    def _take(self, answers: list[Packed]) -> None:
        for number, packed in answers:
            answer = self._waiting.get(number)
            if answer is not None and not answer.done():
                answer.set_result(packed)

    def _fail(self, error: Exception) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(copy.copy(error))


@dataclass
class _Box:
    """Results that a client has not fetched yet."""

    answers: list[Packed] = field(default_factory=list)
    results: asyncio.Event = field(default_factory=asyncio.Event)


class BatchedServer:
    """The worker's side."""

    def __init__(self, do: Callable[[bytes], Awaitable[bytes]]) -> None:
        """`do` executes a call and returns its result; an error is part of the result."""
        self._do = do
        self._boxes: defaultdict[str, _Box] = defaultdict(_Box)
        self._running: Counter[str] = Counter()
        """Running calls per client."""
        self._tasks: set[asyncio.Task[None]] = set()

    def post(self, client: str, calls: list[Packed]) -> None:
        for number, packed in calls:
            self._running[client] += 1
            task = asyncio.create_task(self._work(client, number, packed))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def answers(self, client: str) -> list[Packed]:
        """Results of the client's calls. Long-polls: an empty list after `POLL_S` without any."""
        box = self._boxes[client]
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await box.results.wait()
        answers, box.answers = box.answers, []
        box.results.clear()
        if not self._running[client]:
            del self._boxes[client], self._running[client]
        return answers

    async def _work(self, client: str, number: int, packed: bytes) -> None:
        # waits: the caller has a deadline
        answer = await self._do(packed)
        self._running[client] -= 1
        box = self._boxes[client]
        box.answers.append((number, answer))
        box.results.set()
