"""A training run that survives failures: the loop of `roll.pipeline`, its checkpoints and its recovery.

A step is `next_rollout` → train → `before_publish` → publish → `commit`, as in RLVR. If the trainer dies,
the run rolls back to its last checkpoint with the processes it has; if the controller is killed, everything is restarted
from the ledger on disk.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from roll.config.schema import RolloutConfig
from roll.data.task import Task
from roll.rollout.lifecycle import Lifecycle
from roll.scheduler.filters import no_signal
from roll.scheduler.rollout_result import NOT_FINITE, RolloutBatch
from roll.scheduler.scheduler import RolloutScheduler
from roll.scheduler.task_sampler import BaseSampler, SamplerWrapper, TaskDraw
from roll.simulation.balance import DrawKey
from roll.simulation.cluster import SimCluster
from roll.simulation.failures import MortalLedger


class TrainerDied(Exception):
    """The trainer died: the step, and all training since the last checkpoint, is lost."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint."""

    step: int
    position: int
    """Position in the ledger."""
    scheduler: str
    """The scheduler's state, as JSON."""
    buffer: Path
    """Folder of the groups that were ready."""


class Noted(SamplerWrapper):
    """A task sampler that records the draw of each group."""

    def __init__(self, base: BaseSampler, note: Callable[[TaskDraw], None]) -> None:
        super().__init__(base)
        self._note = note

    def next(self) -> TaskDraw:
        draw = self.base.next()
        self._note(draw)
        return draw


class Training:
    """Must be created inside a running event loop; `begin` starts it, also after a kill."""

    def __init__(
        self,
        path: Path,
        tasks: Sequence[Task],
        config: RolloutConfig,
        make_order: Callable[[], BaseSampler],
        make_world: Callable[[], SimCluster],
        greedy_baseline: bool = False,
    ) -> None:
        self.path = path
        self.tasks = tasks
        self.config = config
        self._make_task_sampler = make_order
        self._make_world = make_world
        self._greedy_baseline = greedy_baseline
        self.step = 0
        """Finished steps; also the version of the weights."""
        self.saved: Saved | None = None
        self.draws: dict[int, DrawKey] = {}
        """The draw of each group of the lineage; groups that were added have none."""
        self.lag = 0
        """Records that were not on disk at the end of the last step."""
        self.ended = 0
        """Groups that ended with the last step, or since the one before."""
        self.tokens_lost = False
        """Set by a test: the next training finds its tokens lost."""
        self.not_finite = 0
        """Set by a test: the update of this many groups of the next step is skipped."""
        self.trainer_died = ""
        """Set by a test to `train` or `publish`: the trainer dies in that phase."""
        self.world: SimCluster
        self.ledger: MortalLedger
        self.scheduler: RolloutScheduler

    async def begin(self) -> None:
        """Starts a new process from the last checkpoint."""
        self.ledger = MortalLedger.open(self.path)
        self.world = self._make_world()
        await self.go_back()

    async def go_back(self) -> None:
        """Resumes from the last checkpoint with the existing processes."""
        await self.restore()
        async with self.world.changing():
            await self._publish(self.step)

    async def restore(self) -> None:
        """Restores the state of the last checkpoint; groups that were in flight then have ended."""
        saved = self.saved or Saved(0, 0, "", self.path.parent)
        self.ledger.roll_back(saved.position, saved.step)
        self.step = saved.step
        self.tokens_lost, self.not_finite, self.trainer_died = False, 0, ""
        lifecycle = Lifecycle(self.ledger, asyncio.get_running_loop().time)
        order, pool = Noted(self._make_task_sampler(), self._note), self.world.pool
        self.scheduler = RolloutScheduler(
            order,
            pool,
            lifecycle,
            self.config,
            no_signal,
            version=saved.step,
            siblings_needed=1 if self._greedy_baseline else 2,
            greedy_baseline=self._greedy_baseline,
        )
        self.world.worker_lost = self.scheduler.worker_lost
        if saved.scheduler:
            await self.scheduler.restore(json.loads(saved.scheduler), self.tasks, saved.buffer)
        self.draws = {group: draw for group, draw in self.draws.items() if group < self.scheduler.next_group}

    def _note(self, draw: TaskDraw) -> None:
        self.draws[self.scheduler.next_group] = (draw.task.id, draw.epoch)

    async def make_step(self) -> None:
        """One step; raises `TrainerDied`."""
        world, scheduler = self.world, self.scheduler
        rollout = await scheduler.next_rollout()
        self.ended = len(rollout.groups)
        homes = self._homes(rollout)
        async with world.changing():
            await asyncio.sleep(world.workload.train_s(group.index for group in rollout.kept))
            if self.trainer_died == "train":
                raise TrainerDied
            if rollout.batch is not None and (self.tokens_lost or homes != self._homes(rollout)):
                self.tokens_lost = False
                scheduler.requeue_batch(rollout, "tokens lost: their rollout worker died")
                return
            await self._publish(self.step + 1)
        self.step += 1
        skipped, self.not_finite = {group.index for group in rollout.kept[: self.not_finite]}, 0
        scheduler.commit(rollout, self.step, {s.id: NOT_FINITE for s in rollout.trained_samples if s.group in skipped})
        self.lag = self.ledger.lag
        self.ledger.flush()
        await world.pool.tokens.write(self.step, rollout.final_states())

    def _homes(self, rollout: RolloutBatch) -> set[tuple[int, int, bool]]:
        """The workers that have the batch's tokens, with their restart counts."""
        homes = {self.world.pool.tokens.locate(sample) for sample in rollout.trained_samples}
        handles = self.world.handles
        return {(home, handles[home].restart_count, handles[home].alive) for home in homes if home is not None}

    async def _publish(self, version: int) -> None:
        self.scheduler.before_publish(version)
        if self.trainer_died == "publish":
            raise TrainerDied
        await self.world.publish(version, self.config.on_weight_update)
        self.scheduler.after_publish(version)

    async def save(self) -> None:
        """Saves a checkpoint between two steps."""
        state = self.scheduler.state()
        self.ledger.flush()
        position, before = self.ledger.position, self.saved
        folder = Path(tempfile.mkdtemp(prefix="buffer-", dir=self.path.parent))
        await self.scheduler.save(folder, state)
        self.saved = Saved(self.step, position, json.dumps(state), folder)
        if before is not None:
            shutil.rmtree(before.buffer)

    async def stop(self) -> None:
        """Stops the run: saves, then marks all in-flight groups as dropped in the ledger."""
        await self.scheduler.halt()
        await self.save()
        await self.scheduler.finish()
        self.ledger.flush()

    async def lose_trainer(self) -> None:
        """After `TrainerDied`: rolls back to the last checkpoint."""
        await self.scheduler.close()
        await self.go_back()

    async def kill(self, written: float) -> None:
        """The controller's process is killed, and all others with it; a share of the unflushed records was written."""
        self.ledger.kill(written)
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:  # repeated, so that no task finishes its work
                task.cancel()
            await asyncio.sleep(0)
        for engine in self.world.engines:
            engine.kill()
        self.world.graders.die()
