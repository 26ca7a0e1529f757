"""A worker's membership in the group that weights are broadcast in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # those who only call a worker do without torch
    from roll.weight_sync.broadcast import BroadcastGroup


class BroadcastMember:
    """What always holds: one broadcast at a time; after `leave` has returned no thread of an earlier broadcast runs, also
    if whoever waited for it was cancelled."""

    def __init__(self) -> None:
        self._group: BroadcastGroup | None = None
        self._abandoned = threading.Event()
        self._under_way: asyncio.Future[None] | None = None

    async def broadcast(
        self,
        join: Callable[[threading.Event], BroadcastGroup],
        move: Callable[[BroadcastGroup], None],
        otherwise: Callable[[], None] = lambda: None,
    ) -> None:
        """Has a thread `move` the weights in the group, after it has joined one if there is none yet. When none forms,
        the thread does the `otherwise` part."""

        def work() -> None:
            if self._group is None:
                try:
                    self._group = join(self._abandoned)
                except Exception:
                    otherwise()
                    raise
            move(self._group)

        await self.contribute(work)

    async def contribute(self, work: Callable[[], None]) -> None:
        """The part of a rank that broadcasts nothing itself."""
        await self._ended()
        thread = self._under_way = asyncio.get_running_loop().run_in_executor(None, work)
        # waits: the group has a deadline
        await asyncio.shield(thread)

    async def leave(self) -> None:
        """Ends a broadcast that is under way; the next one is in a new group."""
        self._abandoned.set()
        if self._group is not None:
            self._group.close()
        await self._ended()
        self.close()

    async def _ended(self) -> None:
        """Returns when no broadcast is under way."""
        if self._under_way is not None:
            # waits: who broadcasts sees within a second that the group was abandoned
            await asyncio.gather(self._under_way, return_exceptions=True)

    def close(self) -> None:
        """Leaves without waiting for a broadcast."""
        self._abandoned.set()
        group, self._group = self._group, None
        self._abandoned = threading.Event()
        if group is not None:
            group.close()
