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
        self._aborted = threading.Event()
        self._in_progress: asyncio.Future[None] | None = None

    async def broadcast(
        self,
        join: Callable[[threading.Event], BroadcastGroup],
        transfer: Callable[[BroadcastGroup], None],
        on_join_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """Runs `transfer` in a thread with the process group, which it joins first if there is none. If joining fails,
        the thread runs `on_join_failure` and the error is raised."""

        def work() -> None:
            if self._group is None:
                try:
                    self._group = join(self._aborted)
                except Exception:
                    on_join_failure()
                    raise
            transfer(self._group)

        await self.run_in_thread(work)

    async def run_in_thread(self, work: Callable[[], None]) -> None:
        """Runs in a thread the work of a rank that does not broadcast itself."""
        await self._wait_idle()
        thread = self._in_progress = asyncio.get_running_loop().run_in_executor(None, work)
        # waits: the group has a deadline
        await asyncio.shield(thread)

    async def leave(self) -> None:
        """Aborts a broadcast in progress and destroys the process group; the next publish creates a new one."""
        self._aborted.set()
        if self._group is not None:
            self._group.close()
        await self._wait_idle()
        self.close()

    async def _wait_idle(self) -> None:
        """Returns when no broadcast is in progress."""
        if self._in_progress is not None:
            # waits: the broadcasting thread checks at least once per second whether the group was abandoned
            await asyncio.gather(self._in_progress, return_exceptions=True)

    def close(self) -> None:
        """Destroys the process group without waiting for a broadcast in progress."""
        self._aborted.set()
        group, self._group = self._group, None
        self._aborted = threading.Event()
        if group is not None:
            group.close()
