"""Publishing during a run: every engine that is alive serves the newest version, also one that was started again.

What always holds: weights travel only while no update changes them; when `publish` returns, each engine in the router
serves the version. One that died meanwhile gets it when it is back, before it serves anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from roll.cluster.errors import RemoteError
from roll.config.schema import Config
from roll.pipeline.roles import Roles
from roll.workers.infer import InferWorker
from roll.workers.publish import publish
from roll.workers.train import TrainWorker

_log = logging.getLogger(__name__)


class Publisher:
    def __init__(self, roles: Roles, config: Config) -> None:
        self._roles = roles
        self._config = config
        self._still = asyncio.Lock()
        """Held while weights change or travel."""
        self._version: int | None = None
        self._groups_broken = True
        """At first too: engines may still be in company with a trainer that has died and was restarted."""

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """While weights change nobody gets them. Ends with `publish`, or with an error that ends the trainer."""
        async with self._still:
            yield

    async def publish(self, version: int) -> None:
        """All engines serve `version` from now on. Called while weights are `changing`."""
        self._version = version
        async with self._interrupted():
            await self._send(set(self._roles.alive), version)

    async def restore(self, engine: int) -> None:
        """An engine that was started again gets the newest version."""
        async with self._still:
            self._groups_broken = True
            if self._version is not None:
                await self._send({engine}, self._version, must=True)
            self._groups_broken = True

    async def _send(self, ranks: set[int], version: int, must: bool = False) -> None:
        roles = self._roles
        while ranks := ranks & roles.alive if not must else ranks:
            if self._groups_broken and self._config.weights.path in ("auto", "broadcast"):
                await self._part(ranks)
            try:
                await publish(roles.actor, roles.engines.subset(sorted(ranks)), version, self._config.weights.path)
                return
            except RemoteError as error:
                lost = {rank for rank in ranks if roles.engines.places[rank].name == error.worker}
                if not lost or must:
                    raise
                self._groups_broken = True
                ranks -= lost
                if ranks:
                    _log.warning("version %d goes to the other engines: %s", version, str(error).splitlines()[0])
                for rank in lost:
                    roles.engine_trouble(rank, str(error))

    async def _part(self, ranks: set[int]) -> None:
        """Trainer and engines broadcast in a new company, because a member was lost."""
        await self._roles.actor.call(TrainWorker.leave_group)
        engines = self._roles.engines.subset(sorted(ranks))
        await asyncio.gather(engines.call_each(InferWorker.leave_group), return_exceptions=True)
        self._groups_broken = False

    @asynccontextmanager
    async def _interrupted(self) -> AsyncIterator[None]:
        """What is being generated stands still, or leaves its engine, until the block ends."""
        roles, pool = self._roles, self._roles.pool
        if not pool.busy:
            yield
            return
        roles.router.hold(True)
        engines = roles.engines.subset(sorted(roles.alive)) if roles.alive else None
        try:
            if engines is not None:
                await asyncio.gather(engines.call_each(InferWorker.pause), return_exceptions=True)
            if self._config.rollout.on_update == "abort":
                await pool.displace("new weights: it goes on from its prefix")
            else:
                await pool.pause()
            yield
        finally:
            if engines is not None:
                await asyncio.gather(engines.call_each(InferWorker.resume), return_exceptions=True)
            await pool.resume()
            roles.router.hold(False)
