"""Rollout workers with almost no cost: the cost of a run with them is the controller's.

Every sample takes the same time; a lease reports when it begins, when its responses end and when its verdicts arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from roll.cluster import Worker
from roll.data.remote_columns import ColumnBlock, RemoteRef
from roll.ledger.log import Transition
from roll.rollout.messages import Lease, SampleResult, WorkerCommand

GENERATE_S, SCORE_S = 60.0, 2.0


class PromptWorker(Worker):
    """Has the methods of `RolloutWorker` that a controller calls by name."""

    async def run(self, report: Callable[[Transition], None], lease: Lease) -> list[SampleResult]:
        loop = asyncio.get_running_loop()

        def move(state: str, info: dict[str, object]) -> None:
            now_s = loop.time()
            for id in lease.samples:
                report(Transition(id, state, "", now_s, info))

        move("generating", {"engine": 0, "worker": self.placement.rank, "version": 0})
        await asyncio.sleep(GENERATE_S)
        move("scoring", {"tokens": 1000, "finish": "stop", "versions": [0, 0]})
        await asyncio.sleep(SCORE_S)
        move("scored", {"reward": 1.0})
        return [
            SampleResult(id, float(number % 2), {}, 1200, 1000, "stop", 0, 0, 1)
            for number, id in enumerate(lease.samples)
        ]

    def execute(self, command: WorkerCommand) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def release(self, keys: Sequence[str]) -> None: ...

    def columns(self, blocks: Sequence[Sequence[str]], mask_below: int = 0) -> list[ColumnBlock]:
        return [ColumnBlock(RemoteRef(None)) for _ in blocks]
