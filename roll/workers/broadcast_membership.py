"""A worker's membership in the broadcast process group of weight sync."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # processes that only call a worker do not import torch
    from roll.weight_sync.broadcast import BroadcastGroup


class BroadcastMember:
    """Invariants: one broadcast at a time; after `leave` has returned, no thread of an earlier broadcast runs, even if
    its caller was cancelled."""

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
        """Runs `move` in a thread with the process group, which it joins first if there is none. If joining fails, the
        thread runs `otherwise` and the error is raised."""

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
        """Runs in a thread the work of a rank that does not broadcast itself."""
        await self._ended()
        thread = self._under_way = asyncio.get_running_loop().run_in_executor(None, work)
        # waits: the group has a deadline
        await asyncio.shield(thread)

    async def leave(self) -> None:
        """Aborts a broadcast in progress and destroys the process group; the next publish creates a new one."""
        self._abandoned.set()
        if self._group is not None:
            self._group.close()
        await self._ended()
        self.close()

    async def _ended(self) -> None:
        """Returns when no broadcast is in progress."""
        if self._under_way is not None:
            # waits: the broadcasting thread checks at least once per second whether the group was abandoned
            await asyncio.gather(self._under_way, return_exceptions=True)

    def close(self) -> None:
        """Destroys the process group without waiting for a broadcast in progress."""
        self._abandoned.set()
        group, self._group = self._group, None
        self._abandoned = threading.Event()
        if group is not None:
            group.close()
