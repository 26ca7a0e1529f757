"""The reward role: judges attempts in grader processes of its own."""

from __future__ import annotations

from pathlib import Path

from roll.cluster import Dispatch, Place, Worker, parallel
from roll.config.schema import RewardConfig
from roll.data.task import Response, Task
from roll.reward import RewardSource, ScoreFailure, Verdict
from roll.reward.pool import GraderPool
from roll.reward.stats import GraderStats


class RewardWorker(Worker):
    def __init__(self, place: Place, config: RewardConfig, source: RewardSource, log: Path | None = None) -> None:
        super().__init__(place)
        self._pool = GraderPool(
            source,
            workers=config.workers,
            deadline_s=config.deadline_s,
            tries=config.tries,
            memory_mb=config.memory_mb,
            cache=config.cache,
            log=log,
        )

    @parallel(Dispatch.ALL)
    async def start(self) -> None:
        """Starts the grader processes."""
        await self._pool.start()

    @parallel(Dispatch.ONE, raises=(ScoreFailure,))
    async def score(self, task: Task, response: Response) -> Verdict:
        """A verdict, or a `ScoreFailure` that says why there is none."""
        return await self._pool.score(task, response)

    @parallel(Dispatch.ONE)
    def take_stats(self) -> GraderStats:
        """What the graders did since this was asked last."""
        return self._pool.take_stats()

    async def close(self) -> None:
        await self._pool.close()
