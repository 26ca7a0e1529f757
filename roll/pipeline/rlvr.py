"""Reinforcement learning from verifiable rewards: the whole dataflow on one page.

roll out → reference, critic → credit → update → publish → record
"""

from __future__ import annotations

import time
from pathlib import Path

from roll.algorithm import make_algorithm
from roll.algorithm.base import check_advantages
from roll.algorithm.metric_names import OF_TRAINER, check_unique
from roll.cluster.errors import TokensLost
from roll.config.algorithm import AlgorithmConfig
from roll.config.errors import RunError
from roll.config.schema import Config
from roll.data.batch import Batch
from roll.data.domains import domains_of
from roll.data.sources import TaskSet
from roll.pipeline.nan_guard import NanGuard
from roll.pipeline.policies import make_policies
from roll.pipeline.publisher import Publisher
from roll.pipeline.recorder import Recorder
from roll.pipeline.residency_manager import ResidencyManager
from roll.pipeline.rlvr_metrics import RLVRMetrics
from roll.pipeline.roles import Roles
from roll.pipeline.state import RLVRState
from roll.pipeline.supervision import Supervision
from roll.rollout.lifecycle import Lifecycle
from roll.scheduler.evaluate import Evaluator
from roll.scheduler.policy import make_policy
from roll.scheduler.rollout_result import LEFT_OUT, NOT_FINITE, RolloutBatch
from roll.scheduler.scheduler import RolloutScheduler
from roll.strategy.train.base import UpdateStats
from roll.workers.critic import CriticWorker
from roll.workers.train import TrainWorker

MAX_IDLE_STEPS = 10
"""A run ends after this many consecutive steps in which the filter kept no group."""


class RLVR:
    """The RLVR loop. Invariants: a batch is trained by weights at most `max_staleness` versions newer than the weights
    that sampled it; `state` holds everything a checkpoint needs besides the weights to resume."""

    def __init__(
        self,
        config: Config,
        roles: Roles,
        publisher: Publisher,
        supervision: Supervision,
        tasks: TaskSet,
        recorder: Recorder,
        state: RLVRState,
        checkpoint: Path | None = None,
    ) -> None:
        """`checkpoint` is the folder that `state` was loaded from."""
        self._config = config
        self._roles = roles
        self._publisher = publisher
        self._recorder = recorder
        self._metrics = RLVRMetrics(config, roles, recorder, domains_of(tasks.train))
        self._nan_guard = NanGuard(recorder.reporter, config.train.max_skipped_in_a_row)
        self.state = state
        self._checkpoint = checkpoint
        self._tasks = tasks
        self._algorithm = make_algorithm(config)
        if state.algorithm:
            self._algorithm.restore(state.algorithm)
        self._residency_manager = ResidencyManager(roles)
        supervision.engine_restored = self._residency_manager.engine_restored
        supervision.scorer_restored = self._residency_manager.scorer_restored
        self._scheduler = make_scheduler(config, tasks, roles, Lifecycle(recorder), state)
        supervision.worker_lost = self._scheduler.worker_lost
        self._evaluator = make_evaluator(config, tasks, roles)

    async def run(self) -> RLVRState:
        """Trains until the last step or until a stop is requested; then evaluates and saves."""
        try:
            return await self._run()
        finally:
            await self._scheduler.close()

    async def _run(self) -> RLVRState:
        config, state, recorder = self._config, self.state, self._recorder
        if state.scheduler:
            await self._scheduler.restore(state.scheduler, self._tasks.train, self._checkpoint)
        async with self._publisher.changing():
            await self._publish(state.step)
        self._scheduler.after_publish(state.step)
        if state.before is None:
            await self._evaluate()
        while state.step < config.train.steps and not recorder.stop_requested and not self._nothing_left_to_learn():
            await self._step()
            last = state.step == config.train.steps
            if config.eval.every and state.step % config.eval.every == 0 and not last:
                await self._evaluate()
            if config.run.checkpoint_every and state.step % config.run.checkpoint_every == 0 and not last:
                await self._save()
        await self._scheduler.halt()
        if not recorder.stop_requested and state.evaluated_step != state.step:
            await self._evaluate()
        await self._save()
        await self._scheduler.finish()
        return state

    async def _step(self) -> None:
        state, started = self.state, time.monotonic()
        await self._residency_manager.enter("generate")
        rollout = await self._scheduler.next_rollout()
        generated = time.monotonic()
        await self._metrics.samples(state.step + 1, rollout)
        async with self._publisher.changing():
            try:
                stats, untrained = await self._train(rollout)
            except TokensLost as lost:  # a rollout worker died: its samples are generated again, and so is the step
                self._scheduler.requeue_batch(rollout, f"tokens lost: {str(lost).splitlines()[0]}")
                return
            await self._publish(state.step + 1)
        self._count_step(rollout, untrained)
        times = (generated - started, time.monotonic() - generated)
        await self._metrics.step(state, rollout, stats, *times)

    async def _train(self, rollout: RolloutBatch) -> tuple[UpdateStats | None, dict[str, str]]:
        """Returns the statistics of the update (None if there was none) and, per untrained sample, the reason."""
        if rollout.batch is None:
            return None, {}
        batch = self._algorithm.credit(await self._with_values(await self._with_reference(rollout.batch)))
        check_advantages(batch, self._config.algorithm.name)
        left_out = dict.fromkeys(set(rollout.batch["sample"].tolist()) - set(batch["sample"].tolist()), LEFT_OUT)
        if len(batch):
            stats = await self._update(batch)
            return stats, left_out | dict.fromkeys(stats.untrained, NOT_FINITE)
        self._recorder.reporter.warned(
            f"step {self.state.step + 1}: nothing was trained: the algorithm left out all of {len(left_out)} samples"
            f"{_selection_settings(self._config.algorithm)}"
        )
        return None, left_out

    async def _update(self, batch: Batch) -> UpdateStats:
        roles, state, algorithm = self._roles, self.state, self._algorithm
        algorithm_metrics = algorithm.metrics()  # before the algorithm observes this step
        value_stats = await self._train_critic(batch)
        actor_step = state.step - self._config.algorithm.critic_warmup_steps
        if value_stats is not None and actor_step < 0:
            # critic warm-up: only the critic is updated
            empty = UpdateStats.empty(batch.tokens, untrained=value_stats.untrained)
            return self._with_algorithm_metrics(empty, algorithm_metrics).with_prefixed("critic", value_stats)
        await self._residency_manager.enter("train")
        with self._recorder.span("train"):
            stats = await roles.actor.call(TrainWorker.update, batch, algorithm.loss_to_send, actor_step)
        if not stats.skipped:
            algorithm.observe(stats.metrics, len(batch))
        self._nan_guard.check(state.step + 1, stats)
        stats = self._with_algorithm_metrics(stats, algorithm_metrics)
        return stats if value_stats is None else stats.with_prefixed("critic", value_stats)

    def _with_algorithm_metrics(self, stats: UpdateStats, metrics: dict[str, float]) -> UpdateStats:
        """The stats with the algorithm's own metrics added."""
        check_unique(metrics, OF_TRAINER | stats.metrics.keys(), f"algorithm.name {self._config.algorithm.name!r}")
        return stats.with_metrics(metrics)

    async def _with_values(self, batch: Batch) -> Batch:
        """The batch with the critic's value predictions."""
        critic = self._roles.critic
        if critic is None:
            return batch
        await self._residency_manager.enter("critic")
        return batch.with_columns(values=await critic.call(CriticWorker.values, batch))

    async def _train_critic(self, batch: Batch) -> UpdateStats | None:
        critic, credit = self._roles.critic, self._algorithm.loss.credit
        if critic is None:
            return None
        with self._recorder.span("critic"):
            stats = await critic.call(CriticWorker.update, batch, credit, self.state.step)
        self._nan_guard.check(self.state.step + 1, stats, "critic")
        return stats

    async def _with_reference(self, batch: Batch) -> Batch:
        """The batch with the reference log-probs that the algorithm needs. If the reward has a KL penalty and a step
        makes several updates, also with the log-probs before the first update, so that actor and critic use the same
        penalty."""
        if not self._algorithm.needs_reference:
            return batch
        actor, reference = self._roles.actor, self._roles.reference
        if self._algorithm.has_kl_in_reward and self._config.train.several_updates:
            await self._residency_manager.enter("train")
            batch = batch.with_columns(proximal=await actor.call(TrainWorker.log_probs, batch))
        await self._residency_manager.enter("train" if reference is None else "reference")
        if reference is None:  # the reference is the base model of the actor's adapters
            batch = batch.with_columns(ref=await actor.call(TrainWorker.base_log_probs, batch))
        else:
            batch = batch.with_columns(ref=await reference.call(TrainWorker.log_probs, batch))
        if self._algorithm.needs_sample_kl:
            estimator, scorer = self._config.algorithm.kl_estimator, reference or actor
            batch = batch.with_columns(kl=await scorer.call(TrainWorker.sample_kl, batch, estimator))
        return batch

    async def _publish(self, version: int) -> None:
        self._scheduler.before_publish(version)
        await self._residency_manager.enter("publish")
        with self._recorder.span("publish"):
            await self._publisher.publish(version)

    async def _save(self) -> None:
        self.state.scheduler, self.state.algorithm = self._scheduler.state(), self._algorithm.state()
        with self._recorder.span("checkpoint"):
            written = self._roles.saved if self._roles.saves_in_background else None
            await self._recorder.save(self.state, self._write, written)

    async def _write(self, folder: Path) -> None:
        await self._scheduler.save(folder, self.state.scheduler)
        await self._roles.save(folder)

    def _count_step(self, rollout: RolloutBatch, untrained: dict[str, str]) -> None:
        self.state.step += 1
        self.state.idle_steps = 0 if rollout.batch is not None else self.state.idle_steps + 1
        self._scheduler.commit(rollout, self.state.step, untrained)

    def _nothing_left_to_learn(self) -> bool:
        """Whether the run can stop early because no task has anything left to teach; raises if no sample ever got a
        reward."""
        if self.state.idle_steps < MAX_IDLE_STEPS:
            return False
        reward = self.state.reward
        if reward > 0:
            explanation = "there is nothing left to learn from these tasks"
            if self._config.algorithm.entropy_coef > 0:
                explanation = "the entropy bonus acts on kept groups alone: to go on exploring, write rollout.filter=none"
            self._recorder.reporter.warned(
                f"stopped at step {self.state.step}: in {MAX_IDLE_STEPS} steps in a row every group's rewards were all "
                f"equal (mean {reward:.2f}); {explanation}"
            )
            return True
        raise RunError(
            f"the filter {self._config.rollout.filter!r} dropped every group of {MAX_IDLE_STEPS} steps in a row: no "
            "sample ever got a reward. Choose easier tasks, a larger rollout.group_size, or a reward with partial credit"
        )

    async def _evaluate(self) -> None:
        self._recorder.reporter.phase("evaluating held-out tasks")
        await self._residency_manager.enter("generate")
        with self._recorder.span("evaluate"):
            evaluation = await self._evaluator.evaluate(self.state.step)
        self.state.seconds += self._recorder.lap()  # this time belongs to no step
        if evaluation is not None:
            self._metrics.evaluated(self.state.step, self.state.evaluated(evaluation))


def _selection_settings(algorithm: AlgorithmConfig) -> str:
    """The settings that leave samples out, for a message."""
    chosen = {name: getattr(algorithm, name) for name in ("mask_truncated", "difficulty_range", "positive_above")}
    settings = [f"algorithm.{name}={value}" for name, value in chosen.items() if value is not None and value is not False]
    return f" ({', '.join(settings)})" if settings else ""


def make_scheduler(
    config: Config, tasks: TaskSet, roles: Roles, lifecycle: Lifecycle, state: RLVRState
) -> RolloutScheduler:
    """The scheduler that the config describes, starting at the weight version of `state`."""
    task_sampler, group_filter = make_policies(config, tasks)
    return RolloutScheduler(
        task_sampler,
        roles.pool,
        lifecycle,
        config.rollout,
        group_filter,
        policy=make_policy(config.rollout.policy, config.root),
        version=state.step,
        siblings_needed=2 if config.algorithm.compares_siblings else 1,
        greedy_baseline=config.algorithm.baseline == "greedy",
        temperatures={domain: config.rollout_of(domain).temperature for domain in config.domains},
    )


def make_evaluator(config: Config, tasks: TaskSet, roles: Roles) -> Evaluator:
    """The evaluator of the run's held-out tasks, or of the evaluation sets that the config names."""
    return Evaluator(tasks.held_out, roles.pool, config.eval, bool(config.domains), tasks.labels)
