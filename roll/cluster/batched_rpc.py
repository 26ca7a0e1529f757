"""Batched RPC: hundreds of concurrent calls to one worker in another process share messages, and so do their results.

A message to another process costs most of a millisecond, whatever its size. Here a call is a number and bytes; calls made
while a batch is in flight wait for the next batch (`batched_channel.py`). A call may report while it runs: its reports
come in order, before its result.

Invariants: every call ends in its own result, or in the error that ended the worker; calls start on the worker in the
order they were made, and calls made after a cancellation start after it; a cancelled call that was not sent yet is never
sent; any other has ended on the worker when its caller continues, unless the worker needs more than `_CANCEL_S`; a batch
in flight delays other calls by not much more than the deadline.
"""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from roll.cluster.batched_channel import BatchedChannel
from roll.cluster.errors import CallTimedOut

T = TypeVar("T")

POLL_S = 5.0
"""How long `BatchedServer.answers` waits before it returns an empty list."""

_CANCEL_S = 10.0
"""How long a cancelled caller waits for the end of its call."""
_UNPOLLED_S = 3600.0
"""After this long without a poll, which is longer than any deadline, a client is dead."""

PackedCall = tuple[int, bytes | None]
"""The number of a call and its serialized content; None cancels it."""
PackedAnswer = tuple[int, bytes | None, bool]
"""The number of a call, a serialized report or result of it, and whether it is the result; None if it was cancelled."""
Report = Callable[[bytes], None]
"""Takes the reports of a call."""


def _no_report(packed: bytes) -> None:
    """Ignores the reports of a call."""


@dataclass(frozen=True)
class _Waiting:
    result: asyncio.Future[bytes]
    report: Report


class BatchedClient:
    """The caller's side."""

    def __init__(
        self,
        worker: str,
        post: Callable[[str, list[PackedCall]], Awaitable[None]],
        answers: Callable[[str], Awaitable[list[PackedAnswer]]],
        deadline_s: float,
    ) -> None:
        """`post` and `answers` call the methods of the worker's `BatchedServer`. If one of them raises, or takes longer
        than the deadline (not counting the server's own `POLL_S`), all in-flight calls fail with that error."""
        client = uuid.uuid4().hex
        self._worker = worker
        self._waiting: dict[int, _Waiting] = {}
        self._number = 0
        self._channel: BatchedChannel[PackedCall, list[PackedAnswer]] = BatchedChannel(
            lambda calls: self._in_time(post(client, calls), "a batch of calls", deadline_s),
            lambda: self._in_time(answers(client), "a poll for results", POLL_S + deadline_s),
            on_result=self._take,
            on_error=self._fail,
            busy=lambda: bool(self._waiting),
        )

    async def call(self, packed: bytes, report: Report = _no_report) -> bytes:
        """The result of a call; `report` gets what it reports. Cancelling this coroutine cancels the call on the worker,
        and waits until it has ended there."""
        self._number += 1
        number, call = self._number, (self._number, packed)
        result: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        result.add_done_callback(_retrieve_error)
        self._waiting[number] = _Waiting(result, report)
        self._channel.post(call)
        try:
            # waits: `Cluster` bounds every call, or its caller does
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            if self._channel.remove(call):
                self._waiting.pop(number, None)
            elif not result.done():
                self._waiting[number] = _Waiting(result, _no_report)
                self._channel.post((number, None))
                await asyncio.wait([result], timeout=_CANCEL_S)
            raise

    async def _in_time(self, trip: Awaitable[T], what: str, deadline_s: float) -> T:
        try:
            async with asyncio.timeout(deadline_s):
                return await trip
        except TimeoutError:
            raise CallTimedOut(self._worker, what, deadline_s) from None

    def _take(self, answers: list[PackedAnswer]) -> None:
        for number, packed, is_result in answers:
            waiting = self._waiting.get(number)
            if waiting is None:
                continue
            if not is_result:
                assert packed is not None, "a report has content"
                waiting.report(packed)
                continue
            del self._waiting[number]
            if waiting.result.done():
                continue
            if packed is None:
                waiting.result.cancel()
            else:
                waiting.result.set_result(packed)

    def _fail(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            if not each.result.done():
                each.result.set_exception(copy.copy(error))


@dataclass
class _Box:
    """Answers that a client has not fetched yet."""

    polled_s: float
    """When the client asked for answers last, or began to make calls."""
    answers: list[PackedAnswer] = field(default_factory=list)
    has_answers: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: dict[int, asyncio.Task[bytes]] = field(default_factory=dict)
    """Running calls by number."""

    def add(self, number: int, content: bytes | None, *, is_result: bool) -> None:
        self.answers.append((number, content, is_result))
        self.has_answers.set()

    def end(self, number: int, call: asyncio.Task[bytes]) -> None:
        """A call has ended, or was cancelled, perhaps before it began."""
        del self.tasks[number]
        self.add(number, None if call.cancelled() else call.result(), is_result=True)


class BatchedServer:
    """The worker's side."""

    def __init__(self, do: Callable[[bytes, Report], Coroutine[Any, Any, bytes]]) -> None:
        """`do` executes a call and returns its result; an error is part of the result. It may report meanwhile."""
        self._do = do
        self._boxes: dict[str, _Box] = {}

    def post(self, client: str, calls: list[PackedCall]) -> None:
        self._remove_dead_clients()
        box = self._box(client)
        for number, packed in calls:
            if packed is not None:
                task = asyncio.create_task(self._do(packed, partial(box.add, number, is_result=False)))
                box.tasks[number] = task
                task.add_done_callback(partial(box.end, number))
            elif number in box.tasks:
                box.tasks[number].cancel()

    async def answers(self, client: str) -> list[PackedAnswer]:
        """What the client's calls have reported and returned. Long-polls: an empty list after `POLL_S` without any."""
        box = self._box(client)
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await box.has_answers.wait()
        box.polled_s = _now_s()
        answers, box.answers = box.answers, []
        box.has_answers.clear()
        if not box.tasks:
            self._boxes.pop(client, None)
        return answers

    def _box(self, client: str) -> _Box:
        if client not in self._boxes:
            self._boxes[client] = _Box(_now_s())
        return self._boxes[client]

    def _remove_dead_clients(self) -> None:
        """Forgets the answers to clients that no longer ask for them."""
        now_s = _now_s()
        for client, box in list(self._boxes.items()):
            if not box.tasks and now_s - box.polled_s > _UNPOLLED_S:
                del self._boxes[client]


def _retrieve_error(result: asyncio.Future[bytes]) -> None:
    """Retrieves the error of a call whose caller no longer waits, so that asyncio does not warn."""
    if not result.cancelled():
        result.exception()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
