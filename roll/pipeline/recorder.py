"""The recorder: everything a run leaves behind, in one place.

What always holds: the ledger is flushed before anything that depends on it (a checkpoint, the metrics of a step) is
written; the reporter hears of a step after it is on disk.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from roll.cluster import Cluster
from roll.config.schema import Config
from roll.data.sample import Sample
from roll.pipeline.report import Reporter, StepReport
from roll.pipeline.roles import Roles
from roll.pipeline.state import RunState
from roll.rollout.evaluate import Evaluation
from roll.rollout.scheduler import RolloutScheduler
from roll.rollout.step import Rollout
from roll.run import (
    Checkpoint,
    Checkpoints,
    Ledger,
    Metrics,
    RunFolder,
    Transition,
    draw_curve,
    drop_samples_after,
)
from roll.run.stages import StageClock
from roll.run.trace import Trace
from roll.strategy.train.base import UpdateStats
from roll.workers.infer import InferWorker
from roll.workers.train import TrainWorker

_SHOW_S = 0.5
"""How often the stages are shown while samples move."""


class Recorder:
    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        ledger: Ledger,
        metrics: Metrics,
        reporter: Reporter,
        trace: Trace | None = None,
    ) -> None:
        self.folder = folder
        self.ledger = ledger
        self.clock = StageClock()
        self.steps = 0
        """Recorded by this process."""
        self._trace = trace
        self._shown_s = 0.0
        self._age: dict[str, Any] = {}
        """How old the last batch was, for the display."""
        self.reporter = reporter
        self.stop_requested = False
        self._config = config
        self._metrics = metrics
        self._checkpoints = Checkpoints(folder, keep=config.run.keep_checkpoints)
        self._clock = time.monotonic()
        self._bytes_before = 0
        self._recent: deque[float] = deque(maxlen=3)
        """Seconds of the latest steps; early ones are no guide to later ones."""

    @classmethod
    @contextmanager
    def open(cls, config: Config, folder: RunFolder, reporter: Reporter) -> Iterator[Recorder]:
        with ExitStack() as stack:
            ledger = stack.enter_context(Ledger.open(folder.ledger_path))
            metrics = stack.enter_context(Metrics(folder, tensorboard=config.run.tensorboard))
            trace = stack.enter_context(Trace.open(folder)) if config.run.trace else None
            yield cls(config, folder, ledger, metrics, reporter, trace)

    def append(self, transition: Transition) -> None:
        """A sample has moved."""
        self.ledger.append(transition)
        self.clock.append(transition)
        if self._trace is not None:
            self._trace.append(transition)
        now = time.monotonic()
        if now - self._shown_s >= _SHOW_S:
            self._shown_s = now
            self.reporter.stages(replace(self.clock.table(), **self._age))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What the controller does while the block runs, for the trace."""
        started = time.time()
        try:
            yield
        finally:
            if self._trace is not None:
                self._trace.span(name, "controller", started, time.time())

    def begin(self) -> RunState:
        """Starts from nothing: what a process that died before its first checkpoint left is rolled back and forgotten."""
        self.clock = StageClock()
        self.ledger.roll_back(0, 0)
        self._metrics.truncate_after(-1)
        drop_samples_after(self.folder, -1)
        return RunState()

    def resume(self, checkpoint: Checkpoint) -> RunState:
        """Goes back to a checkpoint: what came after it is rolled back on the ledger and forgotten by the metrics."""
        self.clock = StageClock()
        state = dict(checkpoint.state)
        self.ledger.roll_back(state.pop("ledger_position"), checkpoint.step)
        self._metrics.truncate_after(checkpoint.step)
        drop_samples_after(self.folder, checkpoint.step)
        return RunState(**state)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        self._metrics.log(step, {"eval/accuracy": evaluation.accuracy, "eval/tokens_mean": evaluation.tokens_mean})
        self.reporter.evaluated(step, evaluation)

    async def record(
        self,
        state: RunState,
        rollout: Rollout,
        stats: UpdateStats | None,
        generating_s: float,
        training_s: float,
        *,
        roles: Roles,
    ) -> None:
        """Puts a finished step on disk and tells the reporter. `state.step` counts it already."""
        seconds = self._lap()
        self.steps += 1
        self._recent.append(generating_s + training_s)
        samples = [s for s in rollout.samples if s.finish is not None and not s.greedy]
        lengths = [s.response_tokens for s in samples]
        generated = sum(s.response_tokens for s in rollout.samples)
        state.seconds += seconds
        state.seconds_generating += generating_s
        state.seconds_training += training_s
        state.generated_tokens += generated
        state.trained_samples += len(rollout.batch) if rollout.batch is not None else 0
        values = rollout_metrics(rollout, samples, lengths)
        state.reward = values["reward/mean"]
        values |= {"time/step_s": seconds, "time/generate_s": generating_s, "time/train_s": training_s}
        overlaps = self._config.rollout.max_staleness > 0
        values["response/tokens_per_s"] = generated / max(seconds if overlaps else generating_s, 1e-9)
        if stats is not None:
            values |= update_metrics(stats)
        if total := roles.executor.controller_bytes:
            passed, self._bytes_before = total - self._bytes_before, total
            values["data/controller_bytes_a_sample"] = passed / max(len(rollout.samples), 1)
        values |= await _peak_memory(roles)
        values |= self.clock.take()
        values |= staleness_metrics(rollout)
        if overlaps:
            self._age = {f"staleness_{what}": values.get(f"staleness/{what}") for what in ("mean", "max")}
        values["queue/graders_full_s"] = roles.pool.take_full_s()
        self.ledger.flush()
        if self._trace is not None:
            for name, value in values.items():
                if name.startswith("queue/"):
                    self._trace.counter(name, time.time(), value)
            self._trace.flush()
        self._metrics.log(state.step, values)
        if self._config.run.save_samples:
            await roles.pool.tokens.write(state.step, rollout.samples)
        await roles.pool.tokens.forget(rollout.samples)
        steps = self._config.train.steps
        self.reporter.stepped(
            StepReport(
                step=state.step,
                steps=steps,
                reward=values["reward/mean"],
                accuracy=state.accuracy,
                response_tokens=values["response/tokens_mean"],
                tokens_per_s=values["response/tokens_per_s"],
                seconds=seconds,
                seconds_left=sum(self._recent) / len(self._recent) * (steps - state.step),
                groups_kept=len(rollout.kept),
                groups=len(rollout.groups),
            )
        )

    async def save(self, actor: Cluster[TrainWorker], state: RunState, scheduler: RolloutScheduler) -> None:
        """A checkpoint of the run as `state` says it is now; what moves meanwhile comes after it."""
        latest = self._checkpoints.latest()
        if latest is not None and latest.step == state.step:
            return
        self.reporter.phase("saving a checkpoint")
        self.ledger.flush()
        state.seconds += self._lap()
        with self._checkpoints.saving(state.step, {**state.to_dict(), "ledger_position": self.ledger.position}) as path:
            await scheduler.save(path, state.scheduler)
            await actor.call(TrainWorker.save, path)

    def finish(self, state: RunState) -> dict[str, Any]:
        """Writes the summary and the curve; returns the summary."""
        state.seconds += self._lap()
        draw_curve(Metrics.read(self.folder.metrics_path), self.folder.curve_path, self._config.model.path)
        summary: dict[str, Any] = {
            "run": str(self.folder.path),
            "model": self._config.model.path,
            "seed": self._config.seed,
            "steps": state.step,
            "steps_planned": self._config.train.steps,
            "stopped": self.stop_requested and state.step < self._config.train.steps,
            "seconds": round(state.seconds, 3),
            "seconds_generating": round(state.seconds_generating, 3),
            "seconds_training": round(state.seconds_training, 3),
            "generated_tokens": state.generated_tokens,
            "trained_samples": state.trained_samples,
            "accuracy_before": state.accuracy_before,
            "accuracy_after": state.accuracy,
            "answers_before": state.answers_before,
            "answers_after": state.answers,
            "curve": str(self.folder.curve_path),
        }
        self.folder.write_summary(summary)
        return summary

    def _lap(self) -> float:
        now = time.monotonic()
        seconds, self._clock = now - self._clock, now
        return seconds


def rollout_metrics(rollout: Rollout, samples: list[Sample], lengths: list[int]) -> dict[str, float]:
    rewards = [s.reward for s in samples if s.state != "failed"]
    truncated = [s.finish == "length" for s in samples]
    values = {
        "reward/mean": float(np.mean(rewards)) if rewards else 0.0,
        "response/tokens_mean": float(np.mean(lengths)) if lengths else 0.0,
        "response/truncated": float(np.mean(truncated)) if truncated else 0.0,
        "groups/kept": len(rollout.kept),
        "groups/issued": len(rollout.groups),
        "samples/failed": sum(s.state == "failed" for s in rollout.samples),
    }
    parts: Counter[str] = Counter()
    for sample in samples:
        parts.update(sample.parts)
    values |= {f"reward/{name}": total / len(samples) for name, total in parts.items()}
    return values


def staleness_metrics(rollout: Rollout) -> dict[str, float]:
    """How old the batch is, and whether its lengths are those of all."""
    values = {"bias/length": rollout.length_bias}
    if ages := rollout.ages:
        values |= {"staleness/mean": float(np.mean(ages)), "staleness/max": max(ages)}
    return values | {f"dropped/{reason.partition(':')[0]}": count for reason, count in rollout.dropped.items()}


def update_metrics(stats: UpdateStats) -> dict[str, float]:
    values = {
        "train/loss": stats.loss,
        "train/grad_norm": stats.grad_norm,
        "train/lr": stats.lr,
        "train/tokens": stats.tokens,
        "train/rows": stats.rows,
        "train/updates": stats.updates,
        "train/skipped": stats.skipped,
    }
    return values | {f"train/{name}": value for name, value in stats.metrics.items()}


async def _peak_memory(roles: Roles) -> dict[str, float]:
    """GPU memory at its peak since the last step, of each role's fullest worker; in one process all roles' together."""
    calls: dict[str, Any] = {"actor_train": roles.actor.call_each(TrainWorker.take_peak_bytes)}
    if roles.alive:
        alive = roles.engines.subset(sorted(roles.alive))
        calls["actor_infer"] = alive.call_each(InferWorker.take_peak_bytes)
    if roles.reference is not None:
        calls["reference"] = roles.reference.call_each(TrainWorker.take_peak_bytes)
    # waits: calls have deadlines
    found = await asyncio.gather(*calls.values(), return_exceptions=True)  # who died meanwhile is missed elsewhere
    peaks = {role: max(peak) for role, peak in zip(calls, found, strict=True) if isinstance(peak, list)}
    return {f"memory/{role}_gib": peak / 2**30 for role, peak in peaks.items() if peak}
