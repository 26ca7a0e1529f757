"""A duplex channel to one worker that batches in both directions.

A call to a worker costs most of a millisecond, so items are sent in batches: while one send is in flight, all items
posted in the meantime wait for the next one.

Invariants: items are sent in the order they were posted. The client long-polls while `busy()` is true. The first error in
either direction is reported once and stops both loops until the next `post`. To cancel an item, remove it from the queue
with `take_back`; if it was already sent, wait with `arrived` for the send to finish before sending the cancellation,
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
        ask: Callable[[], Awaitable[A]],
        *,
        take: Callable[[A], None],
        fail: Callable[[Exception], None],
        busy: Callable[[], bool],
    ) -> None:
        """`send` delivers items; `ask` is the long poll, with a bounded wait; `take` is called with its result, `fail`
        with an error."""
        self._send, self._ask = send, ask
        self._take, self._fail, self._busy = take, fail, busy
        self._posted: list[Q] = []
        self._on_its_way: asyncio.Future[None] | None = None
        self._sender: asyncio.Task[None] | None = None
        self._asker: asyncio.Task[None] | None = None

    def post(self, item: Q) -> None:
        self._posted.append(item)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_all())

    def take_back(self, item: Q) -> bool:
        """Removes an item from the send queue. Returns False if it was already sent."""
        for number, posted in enumerate(self._posted):
            if posted is item:
                del self._posted[number]
                return True
        return False

    async def arrived(self) -> None:
        """Returns once the send in flight, if any, has finished or failed."""
        if self._on_its_way is not None and not self._on_its_way.done():
            # waits: it is a call, which has a deadline
            await asyncio.wait([self._on_its_way])

    async def _send_all(self) -> None:
        await asyncio.sleep(0)  # items posted in this iteration of the event loop join the first batch
        try:
            while self._posted:
                items, self._posted = self._posted, []
                self._on_its_way = asyncio.ensure_future(self._send(items))
                # waits: it is a call, which has a deadline
                await self._on_its_way
                if self._asker is None or self._asker.done():
                    self._asker = asyncio.create_task(self._ask_on())
        except Exception as error:
            self._give_up(error)

    async def _ask_on(self) -> None:
        try:
            while self._busy():
                self._take(await self._ask())
                await asyncio.sleep(0)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._posted.clear()
        self._fail(error)
