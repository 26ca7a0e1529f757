"""The asyncio tasks that run open groups until all of their samples are judged.

Invariants: a group has at most one running task; a cancelled task never calls `judge`; after `halt` no task starts.
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
        """`carry` runs a group and returns when its samples are judged; then `judge` is called. `over` is called whenever
        a task ends, with its error or None."""
        self._carry = carry
        self._judge = judge
        self._over = over
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        """Cancelled tasks that have not ended yet: they are still sending the cancellation to their rollout worker."""
        self._halted = False

    def start(self, group: Group, after: asyncio.Task[None] | None = None) -> None:
        """Starts the task of a group, which first waits until the group's previous task `after` has ended."""
        if not self._halted:
            self._tasks[group.index] = asyncio.create_task(self._run(group, after))

    def cancel(self, group: Group) -> asyncio.Task[None] | None:
        """Cancels the task of a group and returns the task, or None if it has none."""
        task = self._tasks.pop(group.index, None)
        if task is not None:
            task.cancel()
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        return task

    async def halt(self, groups: list[Group]) -> None:
        """Cancels the tasks of these groups and returns when all cancelled tasks have ended."""
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
