"""The asyncio tasks that run open groups until all of their samples are judged.

Invariants: a group has at most one running task; a cancelled task never calls `on_judged`; after `halt` no task starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from roll.data.sample import Group
from roll.rollout.lifecycle import Lifecycle
from roll.scheduler.rollout_pool import RolloutPool


class GroupTasks:
    def __init__(
        self,
        pool: RolloutPool,
        lifecycle: Lifecycle,
        on_judged: Callable[[Group], None],
        on_end: Callable[[Exception | None], None],
    ) -> None:
        """`on_judged` is called when all samples of a group are judged, `on_end` whenever a task ends, with its error or
        None."""
        self._pool = pool
        self._lifecycle = lifecycle
        self._on_judged = on_judged
        self._on_end = on_end
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._cancelled: set[asyncio.Task[None]] = set()
        """Cancelled tasks that have not ended yet: they are still sending the cancellation to their rollout worker."""
        self._halted = False

    def start(self, group: Group, after: asyncio.Task[None] | None = None) -> None:
        """Starts the task of a group, which first waits until the group's previous task `after` has ended."""
        if not self._halted:
            self._tasks[group.index] = asyncio.create_task(self._run_and_judge(group, after))

    def cancel(self, group: Group) -> asyncio.Task[None] | None:
        """Cancels the task of a group and returns the task, or None if it has none."""
        task = self._tasks.pop(group.index, None)
        if task is not None:
            task.cancel()
            self._cancelled.add(task)
            task.add_done_callback(self._cancelled.discard)
        return task

    async def halt(self, groups: list[Group]) -> None:
        """Cancels the tasks of these groups and returns when all cancelled tasks have ended."""
        self._halted = True
        for group in groups:
            self.cancel(group)
        # waits: they were cancelled
        await asyncio.gather(*self._cancelled, return_exceptions=True)

    async def _run_and_judge(self, group: Group, after: asyncio.Task[None] | None) -> None:
        current, failure = asyncio.current_task(), None
        try:
            if after is not None:
                await asyncio.wait([after])  # waits: it was cancelled
            samples = [sample for sample in group.samples if sample.state == "queued"]
            key, index = str(group.index), group.index
            await self._pool.run(key, samples, self._lifecycle, priority=group.priority, fifo_key=index)
            if self._tasks.get(group.index) is current:
                self._on_judged(group)
        except Exception as error:
            failure = error
        finally:
            if self._tasks.get(group.index) is current:
                del self._tasks[group.index]
            self._on_end(failure)
