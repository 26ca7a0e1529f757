"""Starts and stops the roles of a run on the devices of its device map."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from roll.cluster import Cluster, Executor, Worker, WorkerPlacement
from roll.cluster.errors import CallTimedOut, NodeLost, RemoteError, WorkerDied
from roll.cluster.supervisor import role_lost_error
from roll.config.root import with_absolute_paths
from roll.config.schema import Config, FaultToleranceConfig
from roll.devices.inventory import Inventory, Node, this_machine
from roll.devices.map import SCORING_ROLES, DeviceMap, make_map
from roll.devices.residency import ResidencyTable, make_residency_table
from roll.devices.run_requirements import SFT_ROLES, rlvr_roles
from roll.env.stats import EnvStats
from roll.model.find import find_model
from roll.pipeline.executors import make_executor
from roll.pipeline.reward_models import scorer_peaks, start_scorers
from roll.pipeline.start import ending_dead_workers, join_and_offload, offload_at_start
from roll.process.structured_gather import structured_gather
from roll.reward import RewardSpec
from roll.reward.stats import GraderStats
from roll.rollout.worker import RolloutWorker
from roll.run.checkpoint import verify_model
from roll.scheduler.rollout_pool import RolloutPool
from roll.scheduler.router import Router
from roll.strategy.offload import Residency
from roll.workers.critic import CriticWorker
from roll.workers.env import EnvWorker
from roll.workers.infer import InferWorker
from roll.workers.rank_group import GroupWorker
from roll.workers.reward import RewardWorker
from roll.workers.reward_model_client import NO_SCORERS, RewardModelClient
from roll.workers.train import TrainWorker

_PING_S = 5.0
LEARNERS = ("actor_train", "critic")
"""Roles that are restarted whenever a trainer dies."""

W = TypeVar("W", bound=Worker)
G = TypeVar("G", bound=GroupWorker)

Models = tuple[
    Cluster[TrainWorker],
    Cluster[InferWorker],
    Cluster[TrainWorker] | None,
    Cluster[CriticWorker] | None,
    RewardModelClient,
]
"""Trainer, engines, reference, critic, and the client of the models that give rewards."""


@dataclass
class TrainRoles:
    """The running roles that hold a model to train or to compare with. Pipelines without rollouts have no others."""

    executor: Executor
    residency: ResidencyTable
    """Residency: which state of each worker is on its devices in which phase."""
    actor: Cluster[TrainWorker]
    reference: Cluster[TrainWorker] | None
    critic: Cluster[CriticWorker] | None

    @property
    def trainers(self) -> list[Cluster[TrainWorker] | Cluster[CriticWorker]]:
        """The roles with weights of their own that the run has, of actor, reference and critic."""
        return [cluster for cluster in (self.actor, self.reference, self.critic) if cluster is not None]

    @property
    def learners(self) -> list[Cluster[TrainWorker] | Cluster[CriticWorker]]:
        """Actor and critic: they are restarted whenever a trainer dies."""
        return [self.actor] if self.critic is None else [self.actor, self.critic]

    @property
    def clusters(self) -> list[Cluster[Any]]:
        """Every role."""
        return [*self.trainers]

    @property
    def moves(self) -> int:
        """A counter that grows whenever a sample changes its state."""
        return 0

    def waiting(self) -> list[str]:
        """One sentence per kind of waiting work: who waits for which role."""
        return []

    def trainer_died(self, error: RemoteError) -> bool:
        """Whether the error says that a trainer or the reference died or hung."""
        names = {placement.name for cluster in self.trainers for placement in cluster.placements}
        return isinstance(error, WorkerDied | CallTimedOut) and error.worker in names

    async def check_nodes(self) -> None:
        """Raises if a trainer or the reference cannot be restarted because its node, or the cluster, is lost."""
        for cluster in self.trainers:
            for rank, placement in enumerate(cluster.placements):
                if (node := await cluster.lost_node(rank)) is not None:
                    raise role_lost_error(cluster.role, NodeLost(placement.name, node))

    async def restart_trainers(self, checkpoint: Path | None, fault_tolerance: FaultToleranceConfig) -> None:
        """Restarts actor and critic, and the reference if it does not answer, then loads the checkpoint into actor and
        critic (without one they start from their initial weights). If a worker dies meanwhile, raises; the call may be
        repeated."""
        await _restart(self.actor, TrainWorker.set_residency, self.residency, fault_tolerance)
        if self.reference is not None and not await _answers(self.reference):
            await _restart(self.reference, TrainWorker.set_residency, self.residency, fault_tolerance)
        if self.critic is not None:
            await _restart(self.critic, CriticWorker.set_residency, self.residency, fault_tolerance)
        if checkpoint is not None:
            await self.load(checkpoint, fault_tolerance)

    async def load(self, checkpoint: Path, fault_tolerance: FaultToleranceConfig) -> None:
        """Has the actor and the critic load a checkpoint."""
        async with ending_dead_workers(fault_tolerance, self.actor, self.critic):
            await self.actor.call(TrainWorker.load, checkpoint)
            if self.critic is not None:
                await self.critic.call(CriticWorker.load, checkpoint)

    async def save(self, checkpoint: Path) -> None:
        """Has the actor and the critic write a checkpoint, or begin to write it: `saved` waits until they are done."""
        await self.actor.call(TrainWorker.save, checkpoint)
        if self.critic is not None:
            await self.critic.call(CriticWorker.save, checkpoint)

    async def saved(self) -> dict[str, str]:
        """Returns once all workers have written the checkpoint that `save` began, with the file digests that they
        computed while writing."""
        parts = await self.actor.call_each(TrainWorker.saved)
        if self.critic is not None:
            parts += await self.critic.call_each(CriticWorker.saved)
        return {name: digest for part in parts for name, digest in part.items()}

    @property
    def saves_in_background(self) -> bool:
        """Whether training continues while a checkpoint is written."""
        return any(cluster.is_group for cluster in (self.actor, self.critic) if cluster is not None)

    async def peak_memory(self) -> dict[str, float]:
        """Peak GPU memory since the last call, per role that of its fullest worker; if all roles share one process, that
        of the process."""
        calls = self._peak_calls()
        # a dead worker is reported by its supervisor
        # waits: calls have deadlines
        results = await asyncio.gather(*calls.values(), return_exceptions=True)
        peaks = {role: max(peak) for role, peak in zip(calls, results, strict=True) if isinstance(peak, list)}
        return {f"memory/{role}_gib": peak / 2**30 for role, peak in peaks.items() if peak}

    def _peak_calls(self) -> dict[str, Coroutine[Any, Any, list[int]]]:
        trainers = [cluster for cluster in (self.actor, self.reference) if cluster is not None]
        calls = {cluster.role: cluster.call_each(TrainWorker.take_peak_bytes) for cluster in trainers}
        if self.critic is not None:
            calls["critic"] = self.critic.call_each(CriticWorker.take_peak_bytes)
        return calls


@dataclass
class Roles(TrainRoles):
    """All roles of a run with rollouts."""

    engines: Cluster[InferWorker]
    rewards: Cluster[RewardWorker]
    rollouts: Cluster[RolloutWorker]
    environments: Cluster[EnvWorker] | None
    router: Router
    pool: RolloutPool
    scorers: RewardModelClient = NO_SCORERS
    alive: set[int] = field(default_factory=set)
    """Ranks of the engines that are alive."""
    retired: dict[str, set[int]] = field(default_factory=dict)
    """Ranks, by role, of the workers whose nodes are lost."""

    def __post_init__(self) -> None:
        self.alive = set(range(len(self.engines)))

    @property
    def clusters(self) -> list[Cluster[Any]]:
        optional: list[Cluster[Any] | None] = [self.engines, self.rollouts, self.rewards, self.environments]
        return [*self.trainers, *(cluster for cluster in optional if cluster is not None), *self.scorers.clusters]

    @property
    def moves(self) -> int:
        return self.pool.transitions

    def waiting(self) -> list[str]:
        if not self.router.waiting:
            return []
        accepting = ", ".join(map(str, sorted(self.router.open_engines))) or "none"
        return [f"{self.router.waiting} groups wait for an engine; engines that take some: {accepting}"]

    async def take_grader_stats(self) -> GraderStats:
        """The statistics of all graders since the last call."""
        ranks = range(len(self.rewards))
        calls = [self.rewards.call_rank(rank, RewardWorker.take_stats) for rank in ranks]
        # waits: calls have deadlines
        results = await asyncio.gather(*calls, return_exceptions=True)  # a dead worker is reported by its supervisor
        return sum((stats for stats in results if isinstance(stats, GraderStats)), GraderStats())

    async def take_environment_stats(self) -> EnvStats | None:
        """The statistics of all environments since the last call; None if the run has none."""
        if self.environments is None:
            return None
        calls = [self.environments.call_rank(rank, EnvWorker.take_stats) for rank in range(len(self.environments))]
        # waits: calls have deadlines
        results = await asyncio.gather(*calls, return_exceptions=True)  # a dead worker is reported by its supervisor
        return sum((stats for stats in results if isinstance(stats, EnvStats)), EnvStats())

    def engine_trouble(self, engine: int, reason: str) -> None:
        """An engine misbehaves: its requests are moved to other engines."""
        self.pool.on_engine_died(engine, reason)

    async def connect(self) -> None:
        """Gives the rollout and reward workers the current handles of the roles they call. A worker that is dead gets
        them when it is back."""
        judge, environments = self.scorers.judge, self.environments
        scorers = replace(self.scorers, judge=judge and self._on_live_nodes(judge)).snapshot()
        graders, environments = self._on_live_nodes(self.rewards), environments and self._on_live_nodes(environments)
        ranks = set(range(len(self.rollouts))) - self.retired.get("rollout", set())
        connects = (graders.call_rank(rank, RewardWorker.connect, scorers) for rank in range(len(graders)))
        _raise_unless_worker_lost(await asyncio.gather(*connects, return_exceptions=True))
        calls = (
            self.rollouts.call_rank(rank, RolloutWorker.connect, self.engines, graders, environments)
            for rank in sorted(ranks)
        )
        _raise_unless_worker_lost(await asyncio.gather(*calls, return_exceptions=True))

    def _on_live_nodes(self, cluster: Cluster[W]) -> Cluster[W]:
        """The workers of a role whose nodes are alive."""
        retired = self.retired.get(cluster.role)
        return cluster if not retired else cluster.subset([rank for rank in range(len(cluster)) if rank not in retired])

    def _peak_calls(self) -> dict[str, Coroutine[Any, Any, list[int]]]:
        engines = self.engines.subset(sorted(self.alive)) if self.alive else None
        alive = {} if engines is None else {engines.role: engines.call_each(InferWorker.take_peak_bytes)}
        return super()._peak_calls() | alive | scorer_peaks(self.scorers)


def inventory_of(config: Config, executor: Executor) -> Inventory:
    """The available hardware: this machine, or the joined cluster."""
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
    reward: RewardSpec,
    *,
    executor: Executor | None = None,
    map: DeviceMap | None = None,
    residency: ResidencyTable | None = None,
    run: Path | None = None,
    environments: bool = False,
) -> AsyncIterator[Roles]:
    """Starts every role of a run with rollouts; closes all of them at the end, also after an error.

    `map` and `residency` come from the plan. Without them the config alone places the roles, all resident; `environments`
    says whether the run has environment workers.
    """
    executor = executor or make_executor(config)
    try:
        map = map or make_map(config, inventory_of(config, executor), roles_in_use=rlvr_roles(config, environments))
        residency = residency or make_residency_table(map, False)
        yield await _start(with_absolute_paths(config), reward, executor, map, residency, run)
    finally:
        await asyncio.shield(executor.close())


@asynccontextmanager
async def start_trainer(
    config: Config,
    *,
    executor: Executor | None = None,
    map: DeviceMap | None = None,
    residency: ResidencyTable | None = None,
    run: Path | None = None,
) -> AsyncIterator[TrainRoles]:
    """Starts the trainer alone; closes it at the end, also after an error."""
    executor = executor or make_executor(config)
    try:
        map = map or make_map(config, inventory_of(config, executor), roles_in_use=SFT_ROLES)
        residency = residency or make_residency_table(map, False)
        config = with_absolute_paths(config)
        await asyncio.to_thread(_verify_models, config, map)
        _reserve(config, executor, map, run)
        yield TrainRoles(executor, residency, await _start_actor(config, executor, map, residency), None, None)
    finally:
        await asyncio.shield(executor.close())


def _verify_models(config: Config, map: DeviceMap) -> None:
    """Refuses checkpoint weights whose checksums are wrong."""
    scoring_paths = {getattr(config.roles, role).model.path for role in SCORING_ROLES if role in map.roles}
    for path in sorted({config.model.path} | scoring_paths):
        source = find_model(path)
        for folder in (source.location, *source.adapters):
            if folder is not None:
                verify_model(Path(folder))


def _reserve(config: Config, executor: Executor, map: DeviceMap, run: Path | None) -> None:
    """Reserves the devices of all roles."""
    if run is not None:
        executor.write_logs_to(run / "logs", config.run.keep.log_mb << 20)
    learners = [map.roles[role].placements for role in LEARNERS if role in map.roles]
    spares = (
        [placement for placements in learners for placement in placements] if config.fault_tolerance.spare_trainer else []
    )
    executor.reserve(
        [placement for role_placement in map.roles.values() for placement in role_placement.placements], spares
    )


async def _start_actor(
    config: Config, executor: Executor, map: DeviceMap, residency: ResidencyTable
) -> Cluster[TrainWorker]:
    placements = map.roles["actor_train"].placements
    actor = await Cluster.start(executor, lambda placement: TrainWorker(placement, config), placements)
    return await join_and_offload(actor, TrainWorker.set_residency, residency, config.fault_tolerance)


async def _start(
    config: Config, reward: RewardSpec, executor: Executor, map: DeviceMap, residency: ResidencyTable, run: Path | None
) -> Roles:
    graders = None if run is None else run / "graders.log"
    environments_log = None if run is None else run / "environments.log"
    log_bytes = config.run.keep.log_mb << 20
    placements = {role: role_placement.placements for role, role_placement in map.roles.items()}
    await asyncio.to_thread(_verify_models, config, map)
    _reserve(config, executor, map, run)

    async def start(role: str, make: Callable[[WorkerPlacement], W]) -> Cluster[W]:
        return await Cluster.start(executor, make, placements[role])

    async def start_rewards() -> Cluster[RewardWorker]:
        max_concurrent, patience_s = config.roles.judge.max_running, config.rollout.deadline_s
        cluster = await start(
            "reward",
            lambda placement: RewardWorker(
                placement,
                config.reward,
                reward,
                graders,
                replies_at_once=max_concurrent,
                retry_s=patience_s,
                log_bytes=log_bytes,
            ),
        )
        await cluster.call(RewardWorker.start)
        return cluster

    async def start_actor() -> Cluster[TrainWorker]:
        return await _start_actor(config, executor, map, residency)

    async def start_engines() -> Cluster[InferWorker]:
        own_weights = not map.one_copy
        engines = await start("actor_infer", lambda placement: InferWorker(placement, config, own_weights=own_weights))
        return await offload_at_start(engines, InferWorker.set_residency, residency)

    async def start_environments() -> Cluster[EnvWorker] | None:
        if "env" not in placements:
            return None
        cluster = await start(
            "env", lambda placement: EnvWorker(placement, config.env, environments_log, config.root, log_bytes)
        )
        await cluster.call(EnvWorker.start)
        return cluster

    async def start_rollouts() -> Cluster[RolloutWorker]:
        return await start("rollout", lambda placement: RolloutWorker(placement, config, run))

    async def start_reference() -> Cluster[TrainWorker] | None:
        if "reference" not in placements:
            return None
        reference = await start("reference", lambda placement: TrainWorker(placement, config, trainable=False))
        return await join_and_offload(reference, TrainWorker.set_residency, residency, config.fault_tolerance)

    async def start_critic() -> Cluster[CriticWorker] | None:
        if "critic" not in placements:
            return None
        critic = await start("critic", lambda placement: CriticWorker(placement, config))
        return await join_and_offload(critic, CriticWorker.set_residency, residency, config.fault_tolerance)

    async def start_models() -> Models:
        if residency.offloads:  # one after the other: they may not fit on the devices together
            first = await start_actor(), await start_engines(), await start_reference(), await start_critic()
            return *first, await start_scorers(config, executor, map, residency)
        scoring = start_scorers(config, executor, map, residency)
        return await asyncio.gather(start_actor(), start_engines(), start_reference(), start_critic(), scoring)

    try:
        async with asyncio.TaskGroup() as task_group:
            rewards_task = task_group.create_task(start_rewards())
            models_task = task_group.create_task(start_models())
            rollouts_task = task_group.create_task(start_rollouts())
            environments_task = task_group.create_task(start_environments())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the first error; it cancelled the other starts
    rewards, rollouts = rewards_task.result(), rollouts_task.result()
    actor, engines, reference, critic, scorers = models_task.result()
    rollout = config.rollout
    router = Router(
        len(engines),
        executor.deadline_s,
        max_running=rollout.max_running,
        kv_tokens=rollout.kv_cache_tokens,
        expected_tokens=config.longest_response / 2,
    )
    for placement in engines.placements:
        if residency.lowest("actor_infer", placement.rank) != "all":
            await router.drain(placement.rank)
    pool = RolloutPool(
        rollouts, router, tries=rollout.max_attempts, max_scoring=config.reward.queue, deadline_s=executor.deadline_s
    )
    environments = environments_task.result()
    roles = Roles(
        executor, residency, actor, reference, critic, engines, rewards, rollouts, environments, router, pool, scorers
    )
    await roles.connect()
    return roles


async def _restart(
    cluster: Cluster[G],
    set_residency: Callable[[G, Residency], Any],
    residency: ResidencyTable,
    fault_tolerance: FaultToleranceConfig,
) -> None:
    """Restarts all workers of a role, in the state in which the run started them."""
    for ranks in cluster.restart_units:
        await cluster.restart(ranks[0])
    await join_and_offload(cluster, set_residency, residency, fault_tolerance)


def _raise_unless_worker_lost(results: Sequence[object]) -> None:
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, WorkerDied | CallTimedOut):
            raise result


async def _answers(cluster: Cluster[Any]) -> bool:
    try:
        await structured_gather(cluster.ping(rank, _PING_S) for rank in range(len(cluster)))
    except RemoteError:
        return False
    return True
