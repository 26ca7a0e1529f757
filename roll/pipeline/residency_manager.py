"""Turns: who is on the devices in which stage of a step.

Roles that share devices leave them for each other as the plan's stage table says: what a stage does not need is laid
aside before what it needs comes back. An engine that leaves has drained first and gets no samples until it is back;
engines on other devices go on. Models that give rewards send questions back while they are away.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from roll.cluster.errors import CallTimedOut, WorkerDied
from roll.devices.map import SCORING_ROLES
from roll.devices.residency import LEVELS, Name, Stage
from roll.pipeline.roles import Roles
from roll.strategy.offload import Level
from roll.workers.critic import CriticWorker
from roll.workers.infer import InferWorker
from roll.workers.judge import JudgeWorker
from roll.workers.reward_model import RewardModelWorker
from roll.workers.train import TrainWorker


class ResidencyManager:
    def __init__(self, roles: Roles) -> None:
        self._roles = roles
        self._levels: dict[Name, Level] = {name: roles.stages.lowest(*name) for name in roles.stages.levels["generate"]}
        """What of each worker is on its devices now; they start with the least."""

    async def enter(self, stage: Stage) -> None:
        """Returns when all that the stage needs is on its devices, and nothing else that it has to make room for."""
        wanted = self._roles.stages.levels[stage]
        down = {name: level for name, level in wanted.items() if _rank(level) < _rank(self._levels[name])}
        up = {name: level for name, level in wanted.items() if _rank(level) > _rank(self._levels[name])}
        await asyncio.gather(*(self._hold(name, level) for name, level in down.items()))
        await asyncio.gather(*(self._hold(name, level) for name, level in up.items()))
        self._levels.update(wanted)

    async def scorer_restored(self, role: str, rank: int) -> None:
        """A worker of a role that gives rewards was started again: it takes its part in the turns."""
        if (level := self._levels[role, rank]) != "all":
            await self._hold_scorer(role, rank, level)

    async def engine_restored(self, engine: int) -> bool:
        """An engine that was started again takes its part in the turns; whether it is its turn now."""
        level = self._levels["actor_infer", engine]
        if level != "all":
            await self._roles.engines.call_rank(engine, InferWorker.hold, level)
        return level == "all"

    async def _hold(self, name: Name, level: Level) -> None:
        role, rank = name
        if role == "actor_infer":
            if rank not in self._roles.alive:
                return  # when it is back it is told what to hold
            with suppress(WorkerDied, CallTimedOut):  # when it is back it is told what to hold
                await self._hold_engine(rank, level)
        elif role in SCORING_ROLES:
            with suppress(WorkerDied, CallTimedOut):  # when it is back it is told what to hold
                await self._hold_scorer(role, rank, level)
        else:
            await self._hold_trainer(role, rank, level)

    async def _hold_engine(self, rank: int, level: Level) -> None:
        roles = self._roles
        if level != "all":
            roles.router.close_engine(rank)
            if roles.pool.busy:
                await roles.pool.displace("its engine's device is needed: it goes on from its prefix", rank)
            await roles.router.drain(rank)
        await roles.engines.call_rank(rank, InferWorker.hold, level)
        if level == "all":
            roles.router.add_engine(rank)

    async def _hold_scorer(self, role: str, rank: int, level: Level) -> None:
        scorers = self._roles.scorers
        if role == "judge":
            assert scorers.judge is not None, "the plan has a judge that does not run"
            await scorers.judge.call_rank(rank, JudgeWorker.hold, level)
        else:
            assert scorers.reward_model is not None, "the plan has a reward model that does not run"
            await scorers.reward_model.call_rank(rank, RewardModelWorker.hold, level)

    async def _hold_trainer(self, role: str, rank: int, level: Level) -> None:
        roles = self._roles
        if role == "critic":
            assert roles.critic is not None, "the plan has a critic that does not run"
            await roles.critic.call_rank(rank, CriticWorker.hold, level)
            return
        cluster = roles.actor if role == "actor_train" else roles.reference
        assert cluster is not None, f"the plan has a role {role!r} that does not run"
        await cluster.call_rank(rank, TrainWorker.hold, level)


def _rank(level: Level) -> int:
    return LEVELS.index(level)
