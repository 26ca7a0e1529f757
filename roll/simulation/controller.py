"""A run of the real scheduler, router, pool and ledger on simulated engines, graders and environments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from roll.cluster import Cluster, LocalExecutor, WorkerPlacement
from roll.config.schema import RolloutConfig
from roll.data.task import Task
from roll.ledger.log import Ledger
from roll.rollout.lifecycle import Lifecycle
from roll.scheduler.filters import no_signal
from roll.scheduler.long_tail import make_task_sampler
from roll.scheduler.rollout_pool import RolloutPool
from roll.scheduler.rollout_result import RolloutBatch
from roll.scheduler.router import Router
from roll.scheduler.scheduler import RolloutScheduler
from roll.scheduler.task_sampler import TaskSampler
from roll.simulation.engine import SimEngine
from roll.simulation.graders import SimGraderPool
from roll.simulation.rollouts import SimRollouts
from roll.simulation.workload import StepGroups, Workload


@dataclass
class StepTimes:
    """When a step's batch was ready, when its weights were published, and its groups."""

    rolled_out_s: float
    published_s: float
    groups: StepGroups
    ages: list[int] = field(default_factory=list)
    bias: float = 0.0


class SimRun:
    """All parts of a run, on the running loop's clock."""

    def __init__(
        self,
        workload: Workload,
        ledger: Ledger,
        *,
        workers: int = 4,
        tasks: int = 100_000,
        order: TaskSampler | None = None,
        **rollout: object,
    ) -> None:
        self.workload = workload
        self.ledger = ledger
        loop = asyncio.get_running_loop()
        self.loop = loop
        self.config = RolloutConfig.model_validate(
            {
                "groups_per_step": workload.groups_per_step,
                "group_size": workload.group_size,
                "max_new_tokens": workload.responses.max_tokens,
                "max_running": workload.engine.max_running,
                "kv_cache_tokens": workload.engine.kv_tokens,
                "max_replacements": workload.max_replacements,
                **rollout,
            }
        )
        self.engines = [SimEngine(loop, workload.engine) for _ in range(workload.engines)]
        self.graders = SimGraderPool(loop, max(workload.graders, 1))
        self.tasks = [Task(str(number), ()) for number in range(tasks)]
        self.task_sampler = order or make_task_sampler(self.tasks, 0, self.config, sampler="epochs", weights={})
        self._workers = workers
        self.rollouts: list[SimRollouts] = []

    async def start(self) -> None:
        def make(place: WorkerPlacement) -> SimRollouts:
            self.rollouts.append(SimRollouts(place, self.workload, self.engines, self.graders))
            return self.rollouts[-1]

        places = [WorkerPlacement("rollout", rank, self._workers) for rank in range(self._workers)]
        cluster: Cluster[SimRollouts] = await Cluster.start(LocalExecutor(1e9), make, places)
        spec = self.workload.engine
        self.router = Router(
            len(self.engines),
            1e9,
            max_running=spec.max_running,
            kv_tokens=spec.kv_tokens,
            expected_tokens=1_000.0,
        )
        self.pool = RolloutPool(cluster, self.router, tries=5, deadline_s=1e9)  # type: ignore[arg-type]
        self.lifecycle = Lifecycle(self.ledger, self.loop.time)
        self.scheduler = RolloutScheduler(self.task_sampler, self.pool, self.lifecycle, self.config, no_signal)
        self.version = 0
        self._loads = asyncio.create_task(self._report_loads())

    async def _report_loads(self) -> None:
        """Engines report their load once per second."""
        while True:
            await asyncio.sleep(1.0)
            for number, engine in enumerate(self.engines):
                if engine.alive:
                    self.router.report(number, engine.kv_used_tokens)

    async def step(self) -> StepTimes:
        """One training step: the loop of a pipeline, with sleeps for training and publishing."""
        rollout = await self.scheduler.next_rollout()
        rolled_out_s = self.loop.time()
        await asyncio.sleep(self.workload.train_s(group.index for group in rollout.kept))
        await self.publish(self.version + 1)
        self.scheduler.commit(rollout, self.version)
        self.ledger.flush()
        return self._times(rollout, rolled_out_s)

    async def publish(self, version: int) -> None:
        self.scheduler.before_publish(version)
        self.router.pause_admission(True)
        for engine in self.engines:
            engine.pause()
        if self.config.on_weight_update == "abort":
            await self.pool.requeue_generating("new weights")
        else:
            await self.pool.pause()
        await asyncio.sleep(self.workload.publish_s)
        self.version = version
        for rollouts in self.rollouts:
            rollouts.version = version
        for engine in self.engines:
            engine.resume()
        await self.pool.resume()
        self.router.pause_admission(False)

    def _times(self, rollout: RolloutBatch, rolled_out_s: float) -> StepTimes:
        tried = tuple(group.index for group in rollout.groups)
        kept = tuple(group.index for group in rollout.kept)
        return StepTimes(rolled_out_s, self.loop.time(), StepGroups(tried, kept), rollout.ages, rollout.length_bias)

    @property
    def utilisation(self) -> float:
        """Share of the engines' slots that were in use, over the whole time."""
        filled = sum(engine.stats.running_s for engine in self.engines)
        return filled / (self.workload.engine.max_running * len(self.engines) * self.loop.time())

    async def close(self) -> None:
        self._loads.cancel()
        await self.scheduler.close()


async def simulate(
    workload: Workload, steps: int, ledger: Path, on_step: Callable[[SimRun, int], None] | None = None, **settings: object
) -> tuple[list[StepTimes], SimRun]:
    """Runs `steps` steps."""
    with Ledger.open(ledger) as record:
        run = SimRun(workload, record, **settings)  # type: ignore[arg-type]
        await run.start()
        times = []
        try:
            for number in range(steps):
                times.append(await run.step())
                if on_step is not None:
                    on_step(run, number)
        finally:
            await run.close()
    return times, run
