"""A line to one worker: what is posted goes out in batches, and news comes back in batches.

A call to a worker costs most of a millisecond, so nothing is sent alone that could travel together: while one call is on
its way, all that is posted meanwhile waits for the next.

What always holds: items go out in the order they were posted; news is asked for as long as `busy` says that somebody
waits for some; an error on either way is told once, and ends both until something is posted again. Who gives up on an
item takes it back, or, when it has gone out, waits until it has arrived before saying so to the worker: else the word
could overtake the item.
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
        """`send` delivers items; `ask` waits for news, for a bounded time; `take` gets the news, `fail` an error."""
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
        """Keeps an item from going out; False if it has gone."""
        for number, posted in enumerate(self._posted):
            if posted is item:
                del self._posted[number]
                return True
        return False

    async def arrived(self) -> None:
        """Returns once what has gone out has arrived, or failed to."""
        if self._on_its_way is not None and not self._on_its_way.done():
            # waits: it is a call, which has a deadline
            await asyncio.wait([self._on_its_way])

    async def _send_all(self) -> None:
        await asyncio.sleep(0)  # what is posted in this turn of the loop goes along
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
