"""The environment role: plays episodes in environment processes of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from roll.cluster import Dispatch, Worker, WorkerPlacement, dispatch
from roll.config.schema import EnvConfig
from roll.data.task import EnvSpec
from roll.env import EnvFailure, ResetResult, Step
from roll.env.pool import Deadlines, EnvPool
from roll.env.stats import EnvStats
from roll.process.bounded_log import LIMIT_BYTES


class EnvWorker(Worker):
    def __init__(
        self,
        place: WorkerPlacement,
        config: EnvConfig,
        log: Path | None = None,
        root: str = "",
        log_bytes: int = LIMIT_BYTES,
    ) -> None:
        super().__init__(place)
        deadlines = Deadlines(reset_s=config.reset_deadline_s, step_s=config.step_deadline_s)
        memory_mb, limits = config.memory_mb, config.limits
        self._pool = EnvPool(config.processes, config.per_process, deadlines, memory_mb, log, limits, root, log_bytes)

    @dispatch(Dispatch.ALL)
    async def start(self) -> None:
        """Starts the environment processes."""
        await self._pool.start()

    @dispatch(Dispatch.ONE, raises=(EnvFailure,), crowded=True)
    async def reset(self, episode: str, spec: EnvSpec, alone: bool = False) -> ResetResult:
        """Begins an episode, in a process of its own if it is to be alone, or says in an `EnvFailure` why it cannot."""
        return await self._pool.reset(episode, spec, alone)

    @dispatch(Dispatch.ONE, raises=(EnvFailure,), crowded=True)
    async def step(self, episode: str, action: str) -> Step:
        """What the action led to, or an `EnvFailure`, which ends the episode. So does a step that is the last."""
        return await self._pool.step(episode, action)

    @dispatch(Dispatch.ONE, crowded=True)
    async def close_episodes(self, episodes: Sequence[str]) -> None:
        """Leaves episodes; those that are not open here are none of this worker's."""
        for episode in episodes:
            await self._pool.close_episode(episode)

    @dispatch(Dispatch.ONE)
    def take_stats(self) -> EnvStats:
        """What the environments did since this was asked last."""
        return self._pool.take_stats()

    async def close(self) -> None:
        await self._pool.close()
