"""The coroutines that carry open groups to their verdicts.

What always holds: a group has one carrier at most; one that was abandoned judges nothing; after `halt` none begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from roll.data.sample import Group


class GroupTasks:
    def __init__(
        self,
        carry: Callable[[Group], Coroutine[Any, Any, None]],
        judge: Callable[[Group], None],
        over: Callable[[Exception | None], None],
    ) -> None:
        """`carry` returns when a group's samples are judged, `judge` is called then, and `over` whenever a carrier ends,
        with what went wrong."""
        self._carry = carry
        self._judge = judge
        self._over = over
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        """Those that were abandoned, as long as their workers are being told."""
        self._halted = False

    def start(self, group: Group, after: asyncio.Task[None] | None = None) -> None:
        """Carries a group, once the carrier it had before has ended."""
        if not self._halted:
            self._tasks[group.index] = asyncio.create_task(self._run(group, after))

    def cancel(self, group: Group) -> asyncio.Task[None] | None:
        """Ends what runs of a group; the carrier that ends."""
        task = self._tasks.pop(group.index, None)
        if task is not None:
            task.cancel()
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        return task

    async def halt(self, groups: list[Group]) -> None:
        """Abandons these groups, and returns when all that were abandoned have ended."""
        self._halted = True
        for group in groups:
            self.cancel(group)
        # waits: they were cancelled
        await asyncio.gather(*self._leaving, return_exceptions=True)

    async def _run(self, group: Group, after: asyncio.Task[None] | None) -> None:
        me, failure = asyncio.current_task(), None
        try:
            if after is not None:
                await asyncio.wait([after])  # waits: it was cancelled
            await self._carry(group)
            if self._tasks.get(group.index) is me:
                self._judge(group)
        except Exception as error:
            failure = error
        finally:
            if self._tasks.get(group.index) is me:
                del self._tasks[group.index]
            self._over(failure)
