"""Reinforcement learning from verifiable rewards: the whole dataflow on one page.

roll out → reference → credit → update → publish → record
"""

from __future__ import annotations

import time

from roll.algorithm import make_algorithm
from roll.config.errors import RunError
from roll.config.schema import Config
from roll.data.sources import TaskSet
from roll.pipeline.recorder import Recorder
from roll.pipeline.roles import Roles
from roll.pipeline.state import RunState
from roll.pipeline.turns import Turns
from roll.rollout.evaluate import Evaluator
from roll.rollout.lifecycle import Lifecycle
from roll.rollout.scheduler import Rollout, RolloutScheduler
from roll.workers.publish import publish
from roll.workers.train import TrainWorker

MOST_IDLE_STEPS = 10
"""Steps in a row without any group worth training on after which a run ends."""


class RLVR:
    """What always holds: a batch is trained on by the version of the weights that drew it; `state` is what a checkpoint
    needs beside the weights to go on with the same bits."""

    def __init__(self, config: Config, roles: Roles, tasks: TaskSet, recorder: Recorder, state: RunState) -> None:
        self._config = config
        self._roles = roles
        self._recorder = recorder
        self.state = state
        self._algorithm = make_algorithm(config.algorithm)
        self._lifecycle = Lifecycle(recorder.ledger)
        self._turns = Turns(roles)
        self._scheduler = RolloutScheduler(tasks, roles.pool, self._lifecycle, config.rollout, config.seed)
        self._scheduler.next_group = state.next_group
        self._evaluator = Evaluator(tasks.held_out, roles.pool, config.eval)

    async def run(self) -> RunState:
        """Trains until the last step, or until somebody asks to stop; then evaluates and saves."""
        config, state, recorder = self._config, self.state, self._recorder
        await self._publish(state.step)
        if state.accuracy_before is None:
            await self._evaluate()
        while state.step < config.train.steps and not recorder.stop_requested and not self._solved():
            await self._step()
            last = state.step == config.train.steps
            if config.eval.every and state.step % config.eval.every == 0 and not last:
                await self._evaluate()
            if config.run.checkpoint_every and state.step % config.run.checkpoint_every == 0 and not last:
                await recorder.save(self._roles.actor, state)
        if not recorder.stop_requested and state.accuracy_step != state.step:
            await self._evaluate()
        await recorder.save(self._roles.actor, state)
        return state

    async def _step(self) -> None:
        roles, state, started = self._roles, self.state, time.monotonic()
        await self._turns.enter("generate")
        rollout = await self._scheduler.next_rollout()
        generated = time.monotonic()
        stats = None
        if (batch := rollout.batch) is not None:
            if roles.reference is not None:
                await self._turns.enter("reference")
                batch = batch.with_columns(ref=await roles.reference.call(TrainWorker.log_probs, batch))
            batch = self._algorithm.credit(batch)
            await self._turns.enter("train")
            stats = await roles.actor.call(TrainWorker.update, batch, self._algorithm.loss, state.step)
            if stats.skipped:
                self._recorder.reporter.warned(
                    f"step {state.step + 1}: a gradient was not finite; {stats.skipped} updates skipped"
                )
        await self._publish(state.step + 1)
        self._count(rollout)
        times = (generated - started, time.monotonic() - generated)
        await self._recorder.record(state, rollout, stats, *times, roles=roles)

    async def _publish(self, version: int) -> None:
        await self._turns.enter("publish")
        await publish(self._roles.actor, self._roles.engines, version, self._config.weights.path)

    def _count(self, rollout: Rollout) -> None:
        state = self.state
        state.step += 1
        state.next_group = self._scheduler.next_group
        state.idle_steps = 0 if rollout.batch is not None else state.idle_steps + 1
        for sample in rollout.samples:
            if sample.state == "kept":
                self._lifecycle.move(sample, "trained", version=state.step)

    def _solved(self) -> bool:
        """Whether the tasks have nothing left to teach; raises when they never had anything."""
        if self.state.idle_steps < MOST_IDLE_STEPS:
            return False
        reward = self.state.reward
        if reward > 0:
            self._recorder.reporter.warned(
                f"stopped at step {self.state.step}: in {MOST_IDLE_STEPS} steps in a row every group's rewards were all "
                f"equal (mean {reward:.2f}); there is nothing left to learn from these tasks"
            )
            return True
        raise RunError(
            f"the filter {self._config.rollout.filter!r} dropped every group of {MOST_IDLE_STEPS} steps in a row: no "
            "sample ever got a reward. Choose easier tasks, a larger rollout.group_size, or a reward with partial credit"
        )

    async def _evaluate(self) -> None:
        self._recorder.reporter.phase("evaluating held-out tasks")
        await self._turns.enter("generate")
        evaluation = await self._evaluator.evaluate(self.state.step)
        if evaluation is not None:
            self.state.evaluated(evaluation)
            self._recorder.evaluated(self.state.step, evaluation)
