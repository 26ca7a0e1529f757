"""The Environment Worker: runs episodes in its environment processes."""

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
        placement: WorkerPlacement,
        config: EnvConfig,
        log: Path | None = None,
        root: str = "",
        log_bytes: int = LIMIT_BYTES,
    ) -> None:
        super().__init__(placement)
        deadlines = Deadlines(reset_s=config.reset_deadline_s, step_s=config.step_deadline_s)
        memory_mb, limits = config.memory_mb, config.limits
        self._pool = EnvPool(config.processes, config.per_process, deadlines, memory_mb, log, limits, root, log_bytes)

    @dispatch(Dispatch.ALL)
    async def start(self) -> None:
        """Starts the environment processes."""
        await self._pool.start()

    @dispatch(Dispatch.ONE, raises=(EnvFailure,), batched=True)
    async def reset(self, episode: str, spec: EnvSpec, alone: bool = False) -> ResetResult:
        """Starts an episode, in a process of its own if `alone`. Raises `EnvFailure` if that fails."""
        return await self._pool.reset(episode, spec, alone)

    @dispatch(Dispatch.ONE, raises=(EnvFailure,), batched=True)
    async def step(self, episode: str, action: str) -> Step:
        """Performs an action. An `EnvFailure` closes the episode, and so does a step that is `done`."""
        return await self._pool.step(episode, action)

    @dispatch(Dispatch.ONE, batched=True)
    async def close_episodes(self, episodes: Sequence[str]) -> None:
        """Closes episodes; unknown ones are ignored."""
        for episode in episodes:
            await self._pool.close_episode(episode)

    @dispatch(Dispatch.ONE)
    def take_stats(self) -> EnvStats:
        """Statistics of the environments since the last call."""
        return self._pool.take_stats()

    async def close(self) -> None:
        await self._pool.close()
