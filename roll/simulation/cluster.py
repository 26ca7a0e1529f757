"""The processes of a simulated run and their supervision: engines, graders, rollout workers, the router and the pool.

    engine           dies, or hangs and is declared dead: its requests continue on other engines; it is restarted
                     after a while, and serves once it has the weights
    rollout worker   dies, or hangs and is declared dead: its samples are generated again elsewhere; it is restarted
    graders          are down for a while

The first to notice a death reports it to the supervision, which does as `roll.pipeline.supervision` does; publishing does
as `roll.pipeline.publisher` does. Invariant: a dead process is back within the seconds that its death names, once no
update changes the weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Literal

from roll.cluster import Cluster, WorkerPlacement
from roll.scheduler.rollout_pool import RolloutPool
from roll.scheduler.router import Router
from roll.simulation.engine import SimEngine
from roll.simulation.failures import Fate, MortalGraders, MortalRollouts
from roll.simulation.remote_workers import RemoteHandle
from roll.simulation.workload import Workload

PING_S = 2.0
"""Time until the supervision notices a death by itself."""
DEADLINE_S = 3600.0


class SimCluster:
    """Must be created inside a running event loop."""

    def __init__(
        self,
        workload: Workload,
        *,
        workers: int,
        tries: int,
        max_scoring: int,
        way_s: float,
        fate: Fate = lambda task, sample, tries: "",
        report_s: float = 1.0,
    ) -> None:
        """`report_s`: interval at which engines report their load."""
        loop = asyncio.get_running_loop()
        self.workload = workload
        self.version = 0
        """Version of the weights that engines serve."""
        self.publishing = asyncio.Event()
        """Set while weights are being sent to the engines."""
        self.engines = [SimEngine(loop, workload.engine) for _ in range(workload.engines)]
        self.graders = MortalGraders(loop, max(workload.graders, 1))
        self.worker_lost: Callable[[int, str], None] = lambda worker, reason: None
        """Called when a rollout worker dies; its tokens are lost with it."""
        self._fate = fate
        self.handles = [
            RemoteHandle(self._make_rollouts, WorkerPlacement("rollout", rank, workers), way_s) for rank in range(workers)
        ]
        spec = workload.engine
        self.router = Router(
            workload.engines,
            DEADLINE_S,
            max_running=spec.max_running,
            kv_tokens=spec.kv_tokens,
            expected_tokens=workload.responses.mean_tokens,
        )
        cluster: Cluster[Any] = Cluster("rollout", self.handles, DEADLINE_S)
        self.pool = RolloutPool(cluster, self.router, tries=tries, max_scoring=max_scoring, deadline_s=DEADLINE_S)
        self.pool.on_engine_died = lambda engine, reason: self._notice_engine(engine)
        self.pool.on_worker_died = lambda worker, reason: self._notice_worker(worker)
        self._hung: set[int] = set()
        self._noticed_engines: set[int] = set()
        self._noticed_workers: set[int] = set()
        self._back_s: dict[tuple[str, int], float] = {}
        self._still = asyncio.Lock()
        self._report_s = report_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._spawn(self._report_loads())

    @property
    def rollouts(self) -> list[MortalRollouts]:
        return [handle.worker for handle in self.handles]

    def _make_rollouts(self, place: WorkerPlacement) -> MortalRollouts:
        made = MortalRollouts(place, self.workload, self.engines, self.graders, self._fate)
        made.version = self.version
        return made

    # Weights

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """While the block runs, weights may change and none are sent."""
        async with self._still:
            yield

    async def publish(self, version: int, on_weight_update: Literal["pause", "abort"]) -> None:
        async with self._interrupted(on_weight_update):
            self.publishing.set()
            await asyncio.sleep(self.workload.publish_s)
            self.publishing.clear()
            self.version = version
            for rollouts in self.rollouts:
                rollouts.version = version
            for engine in sorted(self._hung):  # an engine that does not take the weights counts as dead
                self.kill_engine(engine, self._back_s["engine", engine])
                self._notice_engine(engine)

    @asynccontextmanager
    async def _interrupted(self, on_weight_update: Literal["pause", "abort"]) -> AsyncIterator[None]:
        if not self.pool.busy:
            yield
            return
        self.router.pause_admission(True)
        for engine in self.engines:
            if engine.alive:
                engine.pause()
        try:
            if on_weight_update == "abort":
                await self.pool.requeue_generating("new weights: it continues from its prefix")
            else:
                await self.pool.pause()
            yield
        finally:
            for number, engine in enumerate(self.engines):
                if engine.alive and number not in self._hung:
                    engine.resume()
            await self.pool.resume()
            self.router.pause_admission(False)

    # Deaths

    def kill_engine(self, engine: int, back_s: float) -> None:
        """The engine dies; workers with samples there get the error at once."""
        if not self.engines[engine].alive:
            return
        self._hung.discard(engine)
        self._back_s["engine", engine] = back_s
        drawn = self.engines[engine].kill()
        for rollouts in self.rollouts:
            rollouts.engine_died(engine, drawn)
        self._spawn(self._after(PING_S, lambda: self._notice_engine(engine)))

    def hang_engine(self, engine: int, hang_s: float, back_s: float) -> None:
        """The engine gives no output until it is declared dead."""
        if not self.engines[engine].alive or engine in self._hung:
            return
        self._hung.add(engine)
        self._back_s["engine", engine] = back_s
        self.engines[engine].pause()

        def declare_dead() -> None:
            if engine in self._hung:
                self.kill_engine(engine, back_s)

        self._spawn(self._after(hang_s, declare_dead))

    def kill_worker(self, worker: int, back_s: float) -> None:
        """The worker dies with everything it has; its callers get the error at once."""
        if not self.handles[worker].alive:
            return
        self._back_s["worker", worker] = back_s
        self.handles[worker].kill()
        self.handles[worker].worker.die()
        self._spawn(self._after(PING_S, lambda: self._notice_worker(worker)))

    def hang_worker(self, worker: int, hang_s: float, back_s: float) -> None:
        """The worker neither receives nor sends anything until it is declared dead."""
        if not self.handles[worker].well:
            return
        self.handles[worker].hang()
        self._spawn(self._after(hang_s, lambda: self.kill_worker(worker, back_s)))

    def stop_graders(self, back_s: float) -> None:
        if self.graders.servers:
            servers = self.graders.servers
            self.graders.die()
            self._spawn(self._after(back_s, lambda: self.graders.restore(servers)))

    @property
    def well(self) -> bool:
        """Whether all processes are alive and serving."""
        engines = all(engine.alive for engine in self.engines) and not self._hung
        return engines and all(handle.well for handle in self.handles) and self.graders.servers > 0 and self._all_in

    @property
    def _all_in(self) -> bool:
        return not self._noticed_workers and len(self.router.open_engines) == len(self.engines)

    async def close(self) -> None:
        """Cancels the supervision's tasks."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Supervision

    def _notice_engine(self, engine: int) -> None:
        if self.engines[engine].alive or engine in self._noticed_engines:
            return
        self._noticed_engines.add(engine)
        self.router.mark_dead(engine)
        self._spawn(self._engine_back(engine))

    async def _engine_back(self, engine: int) -> None:
        await asyncio.sleep(self._back_s["engine", engine])
        async with self._still:
            await asyncio.sleep(self.workload.publish_s)
        self.engines[engine].restore()
        self._noticed_engines.discard(engine)
        self.router.add_engine(engine)

    def _notice_worker(self, worker: int) -> None:
        if self.handles[worker].alive or worker in self._noticed_workers:
            return
        self._noticed_workers.add(worker)
        reason = f"rollout worker died: rollout[{worker}]"
        self.pool.worker_lost(worker, reason)
        self.worker_lost(worker, reason)
        self._spawn(self._worker_back(worker))

    async def _worker_back(self, worker: int) -> None:
        await asyncio.sleep(self._back_s["worker", worker])
        self.handles[worker].restart()
        self._noticed_workers.discard(worker)
        self.pool.worker_joined(worker)

    async def _report_loads(self) -> None:
        while True:
            await asyncio.sleep(self._report_s)
            for number, engine in enumerate(self.engines):
                if engine.alive and number not in self._noticed_engines:
                    self.router.report(number, engine.kv_used_tokens)

    async def _after(self, seconds: float, act: Callable[[], None]) -> None:
        await asyncio.sleep(seconds)
        act()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
