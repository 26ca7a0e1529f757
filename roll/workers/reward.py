"""The Reward Worker: scores responses in its grader processes, after querying the reward model and judge if the reward
uses them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from roll.cluster import Dispatch, Worker, WorkerPlacement, dispatch
from roll.config.schema import RewardConfig
from roll.data.task import Response, Task
from roll.process.bounded_log import LIMIT_BYTES
from roll.reward import RewardSpec, ScoreFailure, Verdict
from roll.reward.model_score_client import ModelScoreClient
from roll.reward.pool import GraderPool
from roll.reward.stats import GraderStats
from roll.workers.reward_model_client import RewardModelClient, ScorerClients


class RewardWorker(Worker):
    """A worker that scores responses in grader processes."""

    def __init__(
        self,
        placement: WorkerPlacement,
        config: RewardConfig,
        spec: RewardSpec,
        log: Path | None = None,
        *,
        replies_at_once: int = 1,
        retry_s: float = 600.0,
        log_bytes: int = LIMIT_BYTES,
    ) -> None:
        """`replies_at_once`: replies that one judge generates at once. `retry_s`: how long to retry calls on a role
        whose worker died."""
        super().__init__(placement)
        self._scorer_clients = ScorerClients(
            replies_at_once=replies_at_once, clients=placement.world_size, retry_s=retry_s
        )
        self._score_client = ModelScoreClient(spec.model_backed_rewards(), self._scorer_clients, config.cache)
        self._pool = GraderPool(
            spec,
            workers=config.workers,
            deadline_s=config.deadline_s,
            tries=config.max_attempts,
            memory_mb=config.memory_mb,
            cache=config.cache,
            log=log,
            log_bytes=log_bytes,
        )

    @dispatch(Dispatch.ALL)
    async def start(self) -> None:
        """Starts the grader processes."""
        await self._pool.start()

    @dispatch(Dispatch.ALL)
    def connect(self, scorers: RewardModelClient) -> None:
        """Sets the reward model and judge roles; called again after one of their workers was restarted."""
        self._scorer_clients.connect(scorers)

    @dispatch(Dispatch.ONE, raises=(ScoreFailure,), batched=True)
    async def score(self, task: Task, response: Response, votes: bool = False) -> Verdict:
        """Scores a response; with `votes` the verdict includes the extracted answer. Raises `ScoreFailure`."""
        try:
            role_scores = await self._score_client.scores(task, response)
        except ScoreFailure as failure:
            self._pool.count_failure(failure)
            raise
        return await self._pool.score(task, response, role_scores, votes=votes)

    @dispatch(Dispatch.ONE)
    def take_stats(self) -> GraderStats:
        """Statistics of the graders, and of the reward model and judge roles, since the last call."""
        return replace(self._pool.take_stats(), roles=self._scorer_clients.take_stats())

    async def close(self) -> None:
        await self._score_client.close()
        await self._pool.close()
