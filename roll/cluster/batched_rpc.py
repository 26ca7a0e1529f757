"""Calls that are made by the hundred on one worker in another process: they travel together, and so do their answers.

A call to another process costs most of a millisecond, whatever is in it. Here a call is a number and bytes; those made
while others are on their way wait for the next trip (`line.py`).

What always holds: every call ends in its own answer, or in the error that took the worker; calls begin there in the order
they were made here; of a call that was given up nothing is heard any more, and if it has not gone out, it never does; no
trip keeps others waiting for much longer than the deadline.
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
"""How long `BatchedServer.answers` waits before it says that there are none yet."""

Packed = tuple[int, bytes]
"""A call or its answer: the number of the call, and what is in it."""


class BatchedClient:
    """The side of those who call."""

    def __init__(
        self,
        worker: str,
        post: Callable[[str, list[Packed]], Awaitable[None]],
        answers: Callable[[str], Awaitable[list[Packed]]],
        deadline_s: float,
    ) -> None:
        """`post` and `answers` are those of the worker's desk. Whatever they raise ends every call that waits, and
        so does a trip that takes longer than the deadline, not counting the desk's own wait."""
        client = uuid.uuid4().hex
        self._worker = worker
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._number = 0
        self._line: BatchedChannel[Packed, list[Packed]] = BatchedChannel(
            lambda calls: self._in_time(post(client, calls), "a crowd of calls", deadline_s),
            lambda: self._in_time(answers(client), "whether there are answers", POLL_S + deadline_s),
            take=self._take,
            fail=self._fail,
            busy=lambda: bool(self._waiting),
        )

    async def call(self, packed: bytes) -> bytes:
        self._number += 1
        call = (self._number, packed)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[call[0]] = answer
        self._line.post(call)
        try:
            # waits: `Cluster` bounds every call
            return await answer
        except asyncio.CancelledError:
            self._line.take_back(call)
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
    """Answers that a client has not asked for yet."""

    answers: list[Packed] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)


class BatchedServer:
    """The worker's side."""

    def __init__(self, do: Callable[[bytes], Awaitable[bytes]]) -> None:
        """`do` answers a call, and says in its answer what went wrong."""
        self._do = do
        self._boxes: defaultdict[str, _Box] = defaultdict(_Box)
        self._under_way: Counter[str] = Counter()
        """Calls of each client."""
        self._tasks: set[asyncio.Task[None]] = set()

    def post(self, client: str, calls: list[Packed]) -> None:
        for number, packed in calls:
            self._under_way[client] += 1
            task = asyncio.create_task(self._work(client, number, packed))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def answers(self, client: str) -> list[Packed]:
        """Answers to the client's calls, as soon as there are any; none after a while."""
        box = self._boxes[client]
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await box.news.wait()
        answers, box.answers = box.answers, []
        box.news.clear()
        if not self._under_way[client]:
            del self._boxes[client], self._under_way[client]
        return answers

    async def _work(self, client: str, number: int, packed: bytes) -> None:
        # waits: the caller gives up after its deadline
        answer = await self._do(packed)
        self._under_way[client] -= 1
        box = self._boxes[client]
        box.answers.append((number, answer))
        box.news.set()
