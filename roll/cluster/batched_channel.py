"""A duplex channel to one worker that batches in both directions.

A call to a worker costs most of a millisecond, so items are sent in batches: while one send is in flight, all items
posted in the meantime wait for the next one.

Invariants: items are sent in the order they were posted. The client long-polls while `busy()` is true. The first error in
either direction is reported once and stops both loops until the next `post`. To cancel an item, remove it from the queue
with `remove`; if it was already sent, wait with `wait_sent` for the send to finish before sending the cancellation,
otherwise the cancellation could arrive first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Q = TypeVar("Q")
A = TypeVar("A")


class BatchedChannel(Generic[Q, A]):
    def __init__(
        self,
        send: Callable[[list[Q]], Awaitable[None]],
        poll: Callable[[], Awaitable[A]],
        *,
        on_result: Callable[[A], None],
        on_error: Callable[[Exception], None],
        busy: Callable[[], bool],
    ) -> None:
        """`send` delivers items; `poll` is the long poll, with a bounded wait; `on_result` is called with its result, and
        `on_error` with an error."""
        self._send, self._poll = send, poll
        self._on_result, self._on_error, self._busy = on_result, on_error, busy
        self._queue: list[Q] = []
        self._in_flight_send: asyncio.Future[None] | None = None
        self._sender: asyncio.Task[None] | None = None
        self._poller: asyncio.Task[None] | None = None

    def post(self, item: Q) -> None:
        self._queue.append(item)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_all())

    def remove(self, item: Q) -> bool:
        """Removes an item from the send queue. Returns False if it was already sent."""
        for number, queued in enumerate(self._queue):
            if queued is item:
                del self._queue[number]
                return True
        return False

    async def wait_sent(self) -> None:
        """Returns once the send in flight, if any, has finished or failed."""
        if self._in_flight_send is not None and not self._in_flight_send.done():
            # waits: it is a call, which has a deadline
            await asyncio.wait([self._in_flight_send])

    async def _send_all(self) -> None:
        await asyncio.sleep(0)  # items posted in this iteration of the event loop join the first batch
        try:
            while self._queue:
                items, self._queue = self._queue, []
                self._in_flight_send = asyncio.ensure_future(self._send(items))
                # waits: it is a call, which has a deadline
                await self._in_flight_send
                if self._poller is None or self._poller.done():
                    self._poller = asyncio.create_task(self._poll_all())
        except Exception as error:
            self._report_error(error)

    async def _poll_all(self) -> None:
        try:
            while self._busy():
                # waits: it is a call, which has a deadline
                self._on_result(await self._poll())
                await asyncio.sleep(0)
        except Exception as error:
            self._report_error(error)

    def _report_error(self, error: Exception) -> None:
        self._queue.clear()
        self._on_error(error)
