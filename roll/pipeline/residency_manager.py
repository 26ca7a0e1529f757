"""Residency manager: which roles are on the devices in which phase of a step.

Roles that share devices are offloaded for each other as the plan's residency table says: state that a phase does not need
is offloaded before the state it needs is loaded. An engine is drained before it is offloaded and gets no samples until it
is back; engines on other devices continue. Models that give rewards reject requests while they are offloaded.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from roll.cluster.errors import CallTimedOut, WorkerDied
from roll.devices.map import SCORING_ROLES
from roll.devices.residency import LEVELS, Name, Phase
from roll.pipeline.roles import Roles
from roll.strategy.offload import Residency
from roll.workers.critic import CriticWorker
from roll.workers.infer import InferWorker
from roll.workers.judge import JudgeWorker
from roll.workers.reward_model import RewardModelWorker
from roll.workers.train import TrainWorker


class ResidencyManager:
    def __init__(self, roles: Roles) -> None:
        self._roles = roles
        self._levels: dict[Name, Residency] = {
            name: roles.residency.lowest(*name) for name in roles.residency.levels["generate"]
        }
        """Current residency of each worker; all start at their lowest level."""

    async def enter(self, phase: Phase) -> None:
        """Returns when everything the phase needs is on its devices, and everything that must make space is offloaded."""
        wanted = self._roles.residency.levels[phase]
        down = {name: level for name, level in wanted.items() if _rank(level) < _rank(self._levels[name])}
        up = {name: level for name, level in wanted.items() if _rank(level) > _rank(self._levels[name])}
        await asyncio.gather(*(self._set_residency(name, level) for name, level in down.items()))
        await asyncio.gather(*(self._set_residency(name, level) for name, level in up.items()))
        self._levels.update(wanted)

    async def scorer_restored(self, role: str, rank: int) -> None:
        """A worker of a role that gives rewards was restarted: sets the residency of the current phase."""
        if (level := self._levels[role, rank]) != "all":
            await self._set_scorer_residency(role, rank, level)

    async def engine_restored(self, engine: int) -> bool:
        """An engine was restarted: sets the residency of the current phase; returns whether it serves in this phase."""
        level = self._levels["actor_infer", engine]
        if level != "all":
            await self._roles.engines.call_rank(engine, InferWorker.set_residency, level)
        return level == "all"

    async def _set_residency(self, name: Name, level: Residency) -> None:
        role, rank = name
        if role == "actor_infer":
            if rank not in self._roles.alive:
                return  # its residency is set when it is back
            with suppress(WorkerDied, CallTimedOut):  # its residency is set when it is back
                await self._set_engine_residency(rank, level)
        elif role in SCORING_ROLES:
            with suppress(WorkerDied, CallTimedOut):  # its residency is set when it is back
                await self._set_scorer_residency(role, rank, level)
        else:
            await self._set_trainer_residency(role, rank, level)

    async def _set_engine_residency(self, rank: int, level: Residency) -> None:
        roles = self._roles
        if level != "all":
            roles.router.close_engine(rank)
            if roles.pool.busy:
                await roles.pool.requeue_generating("its engine's device is needed: it continues from its prefix", rank)
            await roles.router.drain(rank)
        await roles.engines.call_rank(rank, InferWorker.set_residency, level)
        if level == "all":
            roles.router.add_engine(rank)

    async def _set_scorer_residency(self, role: str, rank: int, level: Residency) -> None:
        scorers = self._roles.scorers
        if role == "judge":
            assert scorers.judge is not None, "the plan has a judge that does not run"
            await scorers.judge.call_rank(rank, JudgeWorker.set_residency, level)
        else:
            assert scorers.reward_model is not None, "the plan has a reward model that does not run"
            await scorers.reward_model.call_rank(rank, RewardModelWorker.set_residency, level)

    async def _set_trainer_residency(self, role: str, rank: int, level: Residency) -> None:
        roles = self._roles
        if role == "critic":
            assert roles.critic is not None, "the plan has a critic that does not run"
            await roles.critic.call_rank(rank, CriticWorker.set_residency, level)
            return
        cluster = roles.actor if role == "actor_train" else roles.reference
        assert cluster is not None, f"the plan has a role {role!r} that does not run"
        await cluster.call_rank(rank, TrainWorker.set_residency, level)


def _rank(level: Residency) -> int:
    return LEVELS.index(level)
