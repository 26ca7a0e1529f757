"""Supervision of a run's roles: what happens when a worker dies or hangs, and when nothing makes progress.

    engine           its requests continue on other engines from their prefixes; it restarts and gets the weights first
    grader, env      restarted; callers repeat their requests
    judge, reward model   the same; a judge loads its weights first
    rollout worker   its samples are generated again on other workers; it is restarted
    trainer          ends the step: the run rolls back to its last checkpoint (`entrypoints.py`)

A worker whose node is lost is not restarted: the other workers of its role continue; when the last one is lost, the run
ends.

The ranks of a sharded role die and restart together. Under `executor: local` only they are watched, because only they run
in processes of their own.

Invariants: a dead worker gets no work until it is restarted and ready; more deaths than
`fault_tolerance.restarts` allows end the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from roll.cluster import Cluster
from roll.cluster.supervisor import RestartPolicy, Supervisor
from roll.config.errors import RunError
from roll.config.hints import option
from roll.config.schema import Config, FaultToleranceConfig
from roll.pipeline.publisher import Publisher
from roll.pipeline.recorder import Recorder
from roll.pipeline.roles import Roles, TrainRoles
from roll.pipeline.watchdog import Watchdog
from roll.strategy.registry import warm_up
from roll.workers.env import EnvWorker
from roll.workers.infer import EngineLoad, InferWorker
from roll.workers.judge import JudgeWorker
from roll.workers.rank_group import join_ranks
from roll.workers.reward import RewardWorker

T = TypeVar("T")
_CLUSTER_S = 0.5
_CANCEL_S = 5.0
"""Time for a cancelled run to end its current work."""
_LOADS_S = 1.0
"""Interval at which engines report their load."""
_log = logging.getLogger(__name__)


class TrainSupervision:
    """Supervision of the roles that hold a model to train or to compare with."""

    def __init__(self, roles: TrainRoles, config: FaultToleranceConfig, warn: Callable[[str], None]) -> None:
        self._trainers, self._learners = roles.trainers, roles.learners
        self._executor = roles.executor
        self._warn = warn
        self.restarts = 0
        self.supervisor = Supervisor(
            RestartPolicy(config.ping_s, config.hang_s, config.restarts, config.window_s, config.backoff_s)
        )

    def start(self) -> None:
        """Watches all roles from now on, and the cluster that they run on."""
        self.supervisor.spawn(self._watch_cluster(), endless=True)
        for trainer in self._trainers:
            self._watch_trainer(trainer)

    async def _watch_cluster(self) -> None:
        """Ends the run when the executor reports that no worker can be reached; runs as long as the run does."""
        while (failure := self._executor.failure) is None:  # noqa: ASYNC110
            await asyncio.sleep(_CLUSTER_S)
        self.supervisor.fail(failure)

    def start_local(self) -> None:
        """Watches the ranks of sharded roles: under `executor: local` only they run in processes of their own."""
        for trainer in self._trainers:
            if not trainer.in_process:
                self._watch_trainer(trainer)

    def _watch_trainer(self, trainer: Cluster[Any]) -> None:
        self.supervisor.watch(trainer, self._trainer_lost(trainer), _nothing, restart=False)

    async def keep_spare_trainer(self, config: Config) -> None:
        """Keeps a spare process for every worker that is restarted when a trainer dies. If that fails, the run
        continues."""
        for learner in self._learners:
            warm = partial(warm_up, config, learner.role, learner.is_group)
            try:
                await learner.keep_spares(warm)
            except RunError as error:
                _log.warning("no spare process for %s: %s", learner.role, str(error).splitlines()[0])

    async def race(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, unless the supervisor ends the run first."""
        task = asyncio.ensure_future(work)
        try:
            futures: set[asyncio.Future[Any]] = {task, self.supervisor.failed}
            # waits: the run ends by itself, and has a watchdog
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self.supervisor.failed.result()
            # waits: it is done
            return await task
        finally:
            if not task.done():
                task.cancel()
                # A worker that does not answer would block it; the task ends when the workers are closed.
                await asyncio.wait({task}, timeout=_CANCEL_S)
            if task.done() and not task.cancelled():
                task.exception()  # retrieved so asyncio does not warn; another error is raised

    async def close(self) -> None:
        await self.supervisor.close()

    def _trainer_lost(self, trainer: Cluster[Any]) -> Callable[[int, str], None]:
        def lost(rank: int, why: str) -> None:
            self._warn(f"{why.splitlines()[0]}; the run rolls back to its last checkpoint")
            if not trainer.is_group:  # the supervisor ends the ranks of a group itself
                self.supervisor.spawn(trainer.end(rank))  # a hanging trainer would keep its caller waiting

        return lost


class Supervision(TrainSupervision):
    """Supervision of all roles of a run with rollouts."""

    def __init__(
        self, roles: Roles, publisher: Publisher, config: FaultToleranceConfig, warn: Callable[[str], None]
    ) -> None:
        super().__init__(roles, config, warn)
        self._roles = roles
        self._publisher = publisher
        self.worker_lost: Callable[[int, str], None] = lambda worker, reason: None
        """Called when a rollout worker dies; its tokens are lost with it."""
        self.engine_restored: Callable[[int], Awaitable[bool]] = _always_resident
        """Called when an engine was restarted; returns whether it may use its device in the current phase."""
        self.scorer_restored: Callable[[str, int], Awaitable[None]] = _keeps_residency
        """Called when a worker of a role that gives rewards was restarted."""

    def start(self) -> None:
        super().start()
        roles, watch = self._roles, self.supervisor.watch
        watch(roles.engines, self._engine_lost, self._engine_restarted, on_retired=self._engine_retired)
        watch(roles.rewards, self._warn_restart, self._rewards_restarted, on_retired=self._retired("reward"))
        watch(roles.rollouts, self._rollout_lost, self._rollout_restarted, on_retired=self._rollout_retired)
        if roles.environments is not None:
            watch(roles.environments, self._warn_restart, self._environments_restarted, on_retired=self._retired("env"))
        if roles.scorers.reward_model is not None:
            watch(roles.scorers.reward_model, self._warn_restart, self._reward_model_restarted)
        if roles.scorers.judge is not None:
            watch(roles.scorers.judge, self._warn_restart, self._judge_restarted, on_retired=self._retired("judge"))
        roles.pool.on_engine_died = self._engine_trouble
        self.supervisor.spawn(self._report_loads(), endless=True)
        roles.pool.on_worker_died = lambda worker, reason: self.supervisor.mark_unhealthy("rollout", worker, reason)

    def start_local(self) -> None:
        """Watches sharded roles and the reward model. An engine may run in a process of its own too, but nothing restarts
        it under `executor: local`: when it dies, the run ends."""
        super().start_local()
        scorer = self._roles.scorers.reward_model
        if scorer is not None and not scorer.in_process:
            self.supervisor.watch(scorer, self._warn_restart, self._reward_model_restarted)
        self._roles.pool.on_engine_died = self._engine_ended

    def _engine_ended(self, engine: int, reason: str) -> None:
        if engine not in self._roles.alive:
            return
        self._roles.alive.discard(engine)
        self._roles.router.mark_dead(engine)
        remedy = f"continue with {option('resume')}, or write executor=ray, which restarts it"
        self.supervisor.fail(RunError(f"{reason.splitlines()[0]}; executor local does not restart it: {remedy}"))

    def _warn_restart(self, rank: int, why: str) -> None:
        self._warn(f"{why.splitlines()[0]}; it is restarted")

    def _retired(self, role: str) -> Callable[[int, str], None]:
        def retired(rank: int, why: str) -> None:
            self._warn(f"{why}; the run continues without it")
            self._roles.retired.setdefault(role, set()).add(rank)
            self.supervisor.spawn(self._reconnect())

        return retired

    async def _reconnect(self) -> None:
        try:
            await self._roles.connect()
        except Exception as error:
            self.supervisor.fail(error)

    def _engine_retired(self, engine: int, why: str) -> None:
        self._retired("actor_infer")(engine, why)
        self._roles.alive.discard(engine)
        self._roles.router.mark_dead(engine)

    def _rollout_retired(self, worker: int, why: str) -> None:
        self._retired("rollout")(worker, why)
        self._drop_rollout_worker(worker)

    async def _report_loads(self) -> None:
        """Reports the load of the engines to the router as long as the run lasts."""
        roles = self._roles
        while True:
            await asyncio.sleep(_LOADS_S)
            ranks = sorted(roles.alive)
            calls = (roles.engines.call_rank(rank, InferWorker.load) for rank in ranks)
            loads = await asyncio.gather(*calls, return_exceptions=True)
            for rank, load in zip(ranks, loads, strict=True):
                if isinstance(load, EngineLoad) and rank in roles.alive:
                    roles.router.report(rank, load.cached_tokens)

    def _engine_trouble(self, engine: int, reason: str) -> None:
        """Restarts an engine that misbehaves; its requests have been moved to other engines already."""
        if engine in self._roles.alive:
            self.supervisor.mark_unhealthy(self._roles.engines.role, engine, reason)

    def _engine_lost(self, engine: int, why: str) -> None:
        self._warn_restart(engine, why)
        self._roles.alive.discard(engine)
        self._roles.router.mark_dead(engine)

    async def _engine_restarted(self, engine: int) -> None:
        roles = self._roles
        resident = await self.engine_restored(engine)
        if resident:
            await self._publisher.restore(engine)
        await roles.connect()
        self.restarts += 1
        roles.alive.add(engine)
        if resident:
            roles.router.add_engine(engine)

    async def _rewards_restarted(self, rank: int) -> None:
        await self._roles.rewards.call_rank(rank, RewardWorker.start)
        await self._roles.connect()
        self.restarts += 1

    async def _environments_restarted(self, rank: int) -> None:
        assert self._roles.environments is not None
        await self._roles.environments.call_rank(rank, EnvWorker.start)
        await self._roles.connect()
        self.restarts += 1

    async def _judge_restarted(self, rank: int) -> None:
        assert self._roles.scorers.judge is not None
        await self._roles.scorers.judge.call_rank(rank, JudgeWorker.start)
        await self.scorer_restored("judge", rank)
        await self._roles.connect()
        self.restarts += 1

    async def _reward_model_restarted(self, rank: int) -> None:
        cluster = self._roles.scorers.reward_model
        assert cluster is not None
        await join_ranks(cluster)
        ranks = range(len(cluster)) if cluster.is_group else [rank]
        # waits: calls have deadlines
        await asyncio.gather(*(self.scorer_restored("reward_model", each) for each in ranks))
        await self._roles.connect()
        self.restarts += 1

    def _rollout_lost(self, worker: int, why: str) -> None:
        self._warn_restart(worker, why)
        self._drop_rollout_worker(worker)

    def _drop_rollout_worker(self, worker: int) -> None:
        """A rollout worker died: its samples are generated again on other workers."""
        self._roles.pool.worker_lost(worker, f"rollout worker died: rollout[{worker}]")
        self.worker_lost(worker, f"rollout worker died: rollout[{worker}]")
        self.supervisor.spawn(self._drop_clients(f"rollout[{worker}]/"))

    async def _drop_clients(self, beginning: str) -> None:
        """Cancels the requests of a dead rollout worker on all engines."""
        roles = self._roles
        calls = (roles.engines.call_rank(rank, InferWorker.drop_clients, beginning) for rank in sorted(roles.alive))
        await asyncio.gather(*calls, return_exceptions=True)

    async def _rollout_restarted(self, worker: int) -> None:
        await self._roles.connect()
        self.restarts += 1
        self._roles.pool.worker_joined(worker)


async def _keep_spare_after_first_step(recorder: Recorder, supervision: TrainSupervision, config: Config) -> None:
    """Starts spare processes after the first step, so that they do not delay the start of the run."""
    while not recorder.steps:  # noqa: ASYNC110
        await asyncio.sleep(1.0)
    await supervision.keep_spare_trainer(config)


async def _always_resident(engine: int) -> bool:
    return True


async def _keeps_residency(role: str, rank: int) -> None:
    """If no roles share devices, the worker stays on its devices."""


async def _nothing(rank: int) -> None:
    """A trainer is not restored alone: the whole run rolls back to a checkpoint."""


@asynccontextmanager
async def supervised(
    roles: Roles, config: Config, recorder: Recorder | None = None
) -> AsyncIterator[tuple[Supervision, Publisher]]:
    """Supervises all roles while the block runs."""
    publisher = Publisher(roles, config)
    supervision = Supervision(roles, publisher, config.fault_tolerance, _warnings(recorder))
    async with _watching(supervision, roles, config, recorder):
        yield supervision, publisher


@asynccontextmanager
async def supervised_trainer(
    roles: TrainRoles, config: Config, recorder: Recorder | None = None
) -> AsyncIterator[TrainSupervision]:
    """Supervises the trainer while the block runs."""
    supervision = TrainSupervision(roles, config.fault_tolerance, _warnings(recorder))
    async with _watching(supervision, roles, config, recorder):
        yield supervision


@asynccontextmanager
async def _watching(
    supervision: TrainSupervision, roles: TrainRoles, config: Config, recorder: Recorder | None
) -> AsyncIterator[None]:
    if config.executor == "local":
        supervision.start_local()
    else:
        supervision.start()
    tasks: list[asyncio.Task[None]] = []
    if config.fault_tolerance.spare_trainer and recorder is not None:
        tasks.append(supervision.supervisor.spawn(_keep_spare_after_first_step(recorder, supervision, config)))
    warn = _warnings(recorder)
    watchdog = Watchdog(roles, supervision.supervisor, recorder, config.fault_tolerance.watchdog_s, warn)
    tasks.append(asyncio.create_task(watchdog.run()))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await supervision.close()


def _warnings(recorder: Recorder | None) -> Callable[[str], None]:
    return _log.warning if recorder is None else recorder.reporter.warned
