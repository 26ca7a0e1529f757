"""Publishes weights during a run: every engine that is alive serves the newest version, also after a restart.

Invariants: weights are sent only while no update changes them; when `publish` returns, each engine in the router serves
the version. An engine that died meanwhile gets it after its restart, before it serves anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from roll.cluster.errors import RemoteError
from roll.config.schema import Config
from roll.pipeline.roles import Roles
from roll.weight_sync.broadcast import GroupBroke
from roll.workers.infer import InferWorker
from roll.workers.publish import publish
from roll.workers.train import TrainWorker

ATTEMPTS = 3
"""Attempts at a broadcast that fails although all workers answer."""
_PING_S = 5.0

_log = logging.getLogger(__name__)


class Publisher:
    def __init__(self, roles: Roles, config: Config) -> None:
        self._roles = roles
        self._config = config
        self._weights_lock = asyncio.Lock()
        """Held while weights change or are sent."""
        self._version: int | None = None
        self._members: frozenset[tuple[int, int]] | None = None
        """Engines in the broadcast group with the trainer, each with its restart count. None: any of them may still be in
        a group with workers that died."""

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """While the block runs, weights may change and none are sent. It ends with `publish`, or with an error that ends
        the trainer."""
        async with self._weights_lock:
            yield

    async def publish(self, version: int) -> None:
        """All engines serve `version` from now on. Call it inside `changing`."""
        self._version = version
        async with self._generation_paused():
            await self._send(set(self._roles.alive), version)

    async def restore(self, engine: int) -> None:
        """Sends the newest version to a restarted engine."""
        async with self._weights_lock:
            if self._version is not None:
                await self._send({engine}, self._version, required=True)

    async def _send(self, ranks: set[int], version: int, required: bool = False) -> None:
        """Sends the weights to the engines of these ranks; skips those that die meanwhile, unless `required`. Raises if
        the trainer dies, or if a group of workers that all answer fails `ATTEMPTS` times."""
        roles, attempts_left = self._roles, ATTEMPTS
        while ranks := ranks & roles.alive if not required else ranks:
            await self._regroup(ranks)
            try:
                await publish(
                    roles.actor, roles.engines.subset(sorted(ranks)), version, self._config.weight_sync.transport
                )
                return
            except (RemoteError, GroupBroke) as error:
                self._members = None
                failed = await self._failed_engines(ranks, error)
                attempts_left -= not failed
                if required or not attempts_left or (not failed and isinstance(error, RemoteError)):
                    raise
                ranks -= failed
                if ranks:
                    message = str(error).splitlines()[0]
                    _log.warning("version %d is sent to the remaining engines in a new group: %s", version, message)
                for rank in failed:
                    roles.engine_trouble(rank, str(error))
                    roles.router.close_engine(rank)

    async def _failed_engines(self, ranks: set[int], error: RemoteError | GroupBroke) -> set[int]:
        """The engines that caused an error. A worker that lost a peer of its group cannot name it; then those that do not
        answer a ping."""
        engines = self._roles.engines
        if isinstance(error, RemoteError):
            return {rank for rank in ranks if engines.placements[rank].name == error.worker}
        sorted_ranks = sorted(ranks)
        answers = await asyncio.gather(*(engines.ping(rank, _PING_S) for rank in sorted_ranks), return_exceptions=True)
        silent = {rank for rank, answer in zip(sorted_ranks, answers, strict=True) if answer is not None}
        return silent | (ranks - self._roles.alive)

    async def _regroup(self, ranks: set[int]) -> None:
        """Has the trainer and the engines leave their broadcast group if its members are not exactly these engines: it
        has lost a member, or gets a restarted one."""
        engines = self._roles.engines
        members = frozenset((rank, engines.restart_count(rank)) for rank in ranks)
        if members == self._members or self._config.weight_sync.transport not in ("auto", "broadcast"):
            return
        await self._roles.actor.call(TrainWorker.leave_group)
        calls = (engines.call_rank(rank, InferWorker.leave_group) for rank in sorted(ranks))
        await asyncio.gather(*calls, return_exceptions=True)  # a dead engine is noticed when the weights are sent
        self._members = members

    @asynccontextmanager
    async def _generation_paused(self) -> AsyncIterator[None]:
        """In-flight generation is paused, or leaves its engine, until the block ends."""
        roles, pool = self._roles, self._roles.pool
        if not pool.busy:
            yield
            return
        roles.router.pause_admission(True)
        engines = roles.engines.subset(sorted(roles.alive)) if roles.alive else None
        try:
            if engines is not None:
                await asyncio.gather(engines.call_each(InferWorker.pause), return_exceptions=True)
            if self._config.rollout.on_weight_update == "abort":
                await pool.requeue_generating("new weights: it continues from its prefix")
            else:
                await pool.pause()
            yield
        finally:
            if engines is not None:
                await asyncio.gather(engines.call_each(InferWorker.resume), return_exceptions=True)
            await pool.resume()
            roles.router.pause_admission(False)
