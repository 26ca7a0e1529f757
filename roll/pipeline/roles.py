"""Starting and stopping the roles of a run, on the devices of its map."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from roll.cluster import Cluster, Executor, LocalExecutor, Place, Worker
from roll.cluster.errors import CallTimedOut, RemoteError, WorkerDied
from roll.config.errors import UserError
from roll.config.schema import Config
from roll.devices.inventory import Inventory, Node, this_machine
from roll.devices.map import DeviceMap, make_map
from roll.devices.plan import roles_in_use
from roll.devices.stages import StageTable, residency
from roll.model.loading import SMOLLM2, TINY
from roll.reward import RewardSource
from roll.rollout.pool import RolloutPool
from roll.rollout.router import Router
from roll.rollout.worker import RolloutWorker
from roll.strategy.shelf import Level
from roll.workers.env import EnvWorker
from roll.workers.infer import InferWorker
from roll.workers.reward import RewardWorker
from roll.workers.train import TrainWorker

_PING_S = 5.0
_LEAST_SILENT_S = 20.0
"""Importing libraries may keep a worker that starts from answering for some seconds."""

W = TypeVar("W", bound=Worker)
M = TypeVar("M", TrainWorker, InferWorker)


@dataclass
class Roles:
    """The running roles, and what of each is on its devices in which stage."""

    executor: Executor
    stages: StageTable
    actor: Cluster[TrainWorker]
    engines: Cluster[InferWorker]
    rewards: Cluster[RewardWorker]
    rollouts: Cluster[RolloutWorker]
    reference: Cluster[TrainWorker] | None
    environments: Cluster[EnvWorker] | None
    router: Router
    pool: RolloutPool
    alive: set[int] = field(default_factory=set)
    """Engines that are not lost."""

    def __post_init__(self) -> None:
        self.alive = set(range(len(self.engines)))

    def engine_trouble(self, engine: int, reason: str) -> None:
        """An engine does not do what it should: what it had goes elsewhere."""
        self.pool.engine_trouble(engine, reason)

    def trainer_died(self, error: RemoteError) -> bool:
        """Whether an error is that of a trainer, or of the reference, which ended or hung."""
        trainers = [cluster for cluster in (self.actor, self.reference) if cluster is not None]
        names = {place.name for cluster in trainers for place in cluster.places}
        return isinstance(error, WorkerDied | CallTimedOut) and error.worker in names

    async def restart_trainers(self, checkpoint: Path | None) -> None:
        """Starts trainers that do not answer again, and brings the actor to a checkpoint, or to where it began."""
        for cluster in (self.actor, self.reference):
            for rank in range(len(cluster) if cluster is not None else 0):
                assert cluster is not None
                if cluster is self.actor or not await _answers(cluster, rank):
                    await cluster.restart(rank)
        if checkpoint is not None:
            await self.actor.call(TrainWorker.load, checkpoint)

    async def connect(self) -> None:
        """Tells the rollout workers whom to go through, as they are now."""
        await self.rollouts.call(RolloutWorker.connect, self.engines, self.rewards, self.environments)


def make_executor(config: Config) -> Executor:
    """The executor the config names; nothing is started or joined yet."""
    if config.executor == "local":
        return LocalExecutor(config.ray.call_deadline_s)
    try:
        from roll.cluster.ray_executor import RayExecutor
    except ModuleNotFoundError as error:
        raise UserError(
            f"executor is ray, but the package {error.name} is not installed: run `pip install 'roll[ray]'`, "
            "or write executor=local"
        ) from error
    return RayExecutor(config.ray, silent_s=max(config.supervise.hang_s, _LEAST_SILENT_S))


@contextmanager
def executor_of(config: Config) -> Iterator[Executor]:
    """The executor the config names; whatever happens, what it started is stopped at the end."""
    executor = make_executor(config)
    try:
        yield executor
    finally:
        executor.disconnect()


def inventory_of(config: Config, executor: Executor) -> Inventory:
    """What there is to run on: this machine, or the cluster that is joined."""
    if config.executor == "local" or config.ray.address is None:
        return this_machine()
    from roll.cluster.ray_executor import RayExecutor

    assert isinstance(executor, RayExecutor)
    return Inventory(
        tuple(
            Node(f"node{n}", f.id, f.cores, f.gpus, f.memory_bytes, f.gpu_bytes, aliases=(f.host, f.address))
            for n, f in enumerate(executor.nodes())
        )
    )


@asynccontextmanager
async def start_roles(
    config: Config,
    reward: RewardSource,
    *,
    executor: Executor | None = None,
    map: DeviceMap | None = None,
    stages: StageTable | None = None,
    run: Path | None = None,
    environments: bool = False,
) -> AsyncIterator[Roles]:
    """Every role of the config, running; all of them closed at the end, whatever happens.

    `map` and `stages` are the plan's; without them roles are placed by the config's own words, all resident, with
    workers for environments if there are to be `environments`.
    """
    executor = executor or make_executor(config)
    try:
        map = map or make_map(config, inventory_of(config, executor), roles_in_use=roles_in_use(config, environments))
        stages = stages or residency(map, False)
        yield await _start(_with_absolute_paths(config), reward, executor, map, stages, run)
    finally:
        await asyncio.shield(executor.close())


async def _start(
    config: Config, reward: RewardSource, executor: Executor, map: DeviceMap, stages: StageTable, run: Path | None
) -> Roles:
    graders = None if run is None else run / "graders.log"
    environments_log = None if run is None else run / "environments.log"
    places = {role: placement.places for role, placement in map.roles.items()}
    if run is not None:
        executor.write_logs_to(run / "logs")
    spares = places["actor_train"] if config.supervise.spare_trainer else ()
    executor.reserve([place for some in places.values() for place in some], spares)

    async def start(role: str, make: Callable[[Place], W]) -> Cluster[W]:
        return await Cluster.start(executor, make, places[role])

    async def aside(cluster: Cluster[M], hold: Callable[[M, Level], None]) -> Cluster[M]:
        """Makes room for the others that are to start on the same devices."""
        levels = [stages.lowest(cluster.role, place.rank) for place in cluster.places]
        moves = [(rank, level) for rank, level in enumerate(levels) if level != "all"]
        await asyncio.gather(*(cluster.call_rank(rank, hold, level) for rank, level in moves))
        return cluster

    async def start_rewards() -> Cluster[RewardWorker]:
        cluster = await start("reward", lambda place: RewardWorker(place, config.reward, reward, graders))
        await cluster.call(RewardWorker.start)
        return cluster

    async def start_actor() -> Cluster[TrainWorker]:
        return await aside(await start("actor_train", lambda place: TrainWorker(place, config)), TrainWorker.hold)

    async def start_engines() -> Cluster[InferWorker]:
        return await aside(await start("actor_infer", lambda place: InferWorker(place, config)), InferWorker.hold)

    async def start_environments() -> Cluster[EnvWorker] | None:
        if "env" not in places:
            return None
        cluster = await start("env", lambda place: EnvWorker(place, config.env, environments_log))
        await cluster.call(EnvWorker.start)
        return cluster

    async def start_rollouts() -> Cluster[RolloutWorker]:
        return await start("rollout", lambda place: RolloutWorker(place, config, run))

    async def start_reference() -> Cluster[TrainWorker] | None:
        if "reference" not in places:
            return None
        frozen = await start("reference", lambda place: TrainWorker(place, config, trainable=False))
        return await aside(frozen, TrainWorker.hold)

    async def start_models() -> tuple[Cluster[TrainWorker], Cluster[InferWorker], Cluster[TrainWorker] | None]:
        if stages.takes_turns:  # one after the other, because they may not fit together
            return await start_actor(), await start_engines(), await start_reference()
        return await asyncio.gather(start_actor(), start_engines(), start_reference())

    try:
        async with asyncio.TaskGroup() as starts:
            rewarding = starts.create_task(start_rewards())
            models = starts.create_task(start_models())
            rolling = starts.create_task(start_rollouts())
            acting = starts.create_task(start_environments())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the first; the others were cancelled for it
    rewards, (actor, engines, reference), rollouts = rewarding.result(), models.result(), rolling.result()
    rollout = config.rollout
    router = Router(
        len(engines),
        executor.deadline_s,
        max_running=rollout.max_running,
        kv_tokens=rollout.kv_tokens,
        expected_tokens=rollout.max_new_tokens / 2,
    )
    for place in engines.places:
        if stages.lowest("actor_infer", place.rank) != "all":
            await router.leave(place.rank)
    pool = RolloutPool(
        rollouts, router, tries=rollout.tries, scoring_most=config.reward.queue, deadline_s=executor.deadline_s
    )
    roles = Roles(executor, stages, actor, engines, rewards, rollouts, reference, acting.result(), router, pool)
    await roles.connect()
    return roles


async def _answers(cluster: Cluster[TrainWorker], rank: int) -> bool:
    try:
        await cluster.ping(rank, _PING_S)
    except RemoteError:
        return False
    return True


def _with_absolute_paths(config: Config) -> Config:
    """Workers may have another current folder."""
    model, updates = config.model, {}
    if model.path not in (TINY, SMOLLM2) and os.path.exists(os.path.expanduser(model.path)):
        updates["path"] = os.path.abspath(os.path.expanduser(model.path))
    if model.chat_template is not None:
        updates["chat_template"] = os.path.abspath(os.path.expanduser(model.chat_template))
    return config.model_copy(update={"model": model.model_copy(update=updates)})
