"""The records of an RLVR step: its metrics, its samples, and a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np

from roll.config.evaluation import HELD_OUT
from roll.config.schema import Config
from roll.data.sample import Sample
from roll.pipeline.recorder import Recorder, update_metrics
from roll.pipeline.report import HeldOutResult
from roll.pipeline.roles import Roles
from roll.pipeline.state import RLVRState, estimate_values
from roll.rollout.messages import FinalState
from roll.run import Panel, drop_samples_after
from roll.scheduler.evaluate import (
    EvalFailure,
    Evaluation,
    SetEvaluation,
    failures_of,
    is_binary,
    measure_of,
    part_means,
    parts_text,
)
from roll.scheduler.rollout_result import RolloutBatch
from roll.strategy.train.base import UpdateStats


def panels(state: RLVRState) -> tuple[Panel, Panel]:
    """The panels of the run's curve."""
    sets = list(state.latest.sets) if state.latest else []
    dots = {f"eval/{name}/reward": f"{name} {measure_of(name not in state.other_rewards)}" for name in sets}
    if sets in ([], [HELD_OUT]):
        dots = {"eval/reward": f"held-out {state.measure}"}
    return (
        Panel("mean reward", "reward/mean", "training reward", dots),
        Panel("answer length (tokens)", "response/tokens_mean"),
    )


class RLVRMetrics:
    def __init__(self, config: Config, roles: Roles, recorder: Recorder, domains: Sequence[str] = ()) -> None:
        self._config = config
        self._domains = domains if config.domains or len(domains) > 1 else ()
        self._roles = roles
        self._recorder = recorder
        self._bytes_before = roles.executor.controller_bytes
        self._reported_failures: set[tuple[str, str]] = set()
        self._written_states: list[FinalState] = []
        """Final states of the current step's samples, as they were written to disk."""

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        values = {"eval/reward": evaluation.reward, "eval/tokens_mean": evaluation.tokens_mean}
        for name, evaluated_set in evaluation.sets.items():
            values |= set_metrics("eval" if name == HELD_OUT else f"eval/{name}", evaluated_set)
        self._recorder.evaluated(step, values, held_out_result(evaluation))
        self._warn_of_failures(f"step {step}, held-out tasks", evaluation.failures)

    async def samples(self, step: int, rollout: RolloutBatch) -> None:
        """Writes the samples of a step before it is trained on, so that they are on disk if their rollout worker dies
        later. Deletes those of an earlier attempt at the step whose tokens were lost."""
        if self._config.run.save_samples:
            drop_samples_after(self._recorder.folder, step - 1)
            self._written_states = rollout.final_states()
            await self._roles.pool.tokens.write(step, self._written_states)

    async def step(
        self, state: RLVRState, rollout: RolloutBatch, stats: UpdateStats | None, generating_s: float, training_s: float
    ) -> None:
        """Writes a finished step to disk and reports it. `state.step` already includes it."""
        roles, recorder = self._roles, self._recorder
        seconds = recorder.lap()
        samples = [s for s in rollout.samples if s.finish is not None and not s.greedy]
        lengths = [s.response_tokens for s in samples]
        generated = sum(s.response_tokens for s in rollout.samples)
        state.seconds += seconds
        state.seconds_generating += generating_s
        state.seconds_training += training_s
        state.generated_tokens += generated
        state.trained_samples += sum(s.state == "trained" for s in rollout.trained_samples)
        values = rollout_metrics(rollout, samples, lengths)
        for domain in self._domains:
            values |= domain_metrics(domain, rollout, samples)
        state.reward = values["reward/mean"]
        if not is_binary(s for s in samples if s.state != "failed"):
            state.saw_other_rewards()
        values |= {"time/step_s": seconds, "time/generate_s": generating_s, "time/train_s": training_s}
        overlaps = self._config.rollout.max_staleness > 0
        values["response/tokens_per_s"] = generated / max(seconds if overlaps else generating_s, 1e-9)
        if stats is not None:
            values |= update_metrics(stats)
        if total := roles.executor.controller_bytes:
            transferred, self._bytes_before = total - self._bytes_before, total
            values["controller/bytes_per_sample"] = transferred / max(len(rollout.samples), 1)
        values |= await roles.peak_memory()
        values |= (await roles.take_grader_stats()).metrics()
        if (environments := await roles.take_environment_stats()) is not None:
            values |= environments.metrics()
        values |= recorder.clock.take()
        values |= staleness_metrics(rollout)
        if overlaps:
            recorder.age = {f"staleness_{what}": values.get(f"staleness/{what}") for what in ("mean", "max")}
        values["rollout/grader_backpressure_s"] = roles.pool.take_backpressure_s()
        recorder.log(state.step, values)
        if self._config.run.save_samples and rollout.final_states() != self._written_states:
            await roles.pool.tokens.write(state.step, rollout.final_states(), overwrite=True)
        facts = [
            ("answer length", f"{values['response/tokens_mean']:.1f} tokens"),
            ("speed", f"{values['response/tokens_per_s']:.0f} tokens/s generating"),
            ("groups", f"{len(rollout.kept)} kept of {len(rollout.groups)}"),
        ]
        if failed := int(values["samples/failed"]):
            facts.append(("failed", f"{failed} samples"))
        worked_s = generating_s + training_s
        recorder.report(state.step, "reward", values["reward/mean"], facts, values, worked_s=worked_s)
        self._warn_of_failures(f"step {state.step}", failures_of(rollout.samples))

    def _warn_of_failures(self, where: str, failures: Sequence[EvalFailure]) -> None:
        """Warns of each kind of failure once: the run continues without failed samples, and its user must know."""
        for failure in failures:
            if (failure.domain, failure.kind) not in self._reported_failures:
                self._reported_failures.add((failure.domain, failure.kind))
                self._recorder.reporter.warned(f"{where}: {failure}")


def set_metrics(where: str, evaluated_set: SetEvaluation) -> dict[str, float]:
    """The metrics of one set, prefixed by `where`."""
    values = {name: value for name, value in estimate_values(evaluated_set).items() if value is not None}
    values |= {"tokens_mean": evaluated_set.tokens_mean, "failed": evaluated_set.failed}
    values |= {f"reward/{part}": mean for part, mean in evaluated_set.parts.items()}
    for name, score in evaluated_set.domains.items():
        values |= {f"{name}/reward": score.reward, f"{name}/tokens_mean": score.tokens_mean}
        values |= {f"{name}/reward/{part}": mean for part, mean in score.parts.items()}
    return {f"{where}/{name}": value for name, value in values.items()}


def held_out_result(evaluation: Evaluation) -> HeldOutResult:
    each = "".join(f", {name} {score.reward:.3f}" for name, score in evaluation.domains.items())
    for name, evaluated_set in evaluation.sets.items():
        each += "" if name == HELD_OUT else f", {name} {evaluated_set.measure} {evaluated_set.reward.value:.3f}"
        each += "".join(
            f", {of} {evaluated_set.estimates[of].value:.3f}" for of in evaluated_set.estimates if of != "reward"
        )
    parts = "" if evaluation.domains else parts_text(evaluation.parts)
    mean = f"mean of {len(evaluation.sets)} sets, " if len(evaluation.sets) > 1 else ""
    detail = f"{mean}{evaluation.tokens_mean:.1f} tokens per answer{parts}{each}"
    return HeldOutResult(evaluation.name, evaluation.reward, detail)


def rollout_metrics(rollout: RolloutBatch, samples: list[Sample], lengths: list[int]) -> dict[str, float]:
    rewards = [s.reward for s in samples if s.state != "failed"]
    truncated = [s.finish == "length" for s in samples]
    values = {
        "reward/mean": float(np.mean(rewards)) if rewards else 0.0,
        "response/tokens_mean": float(np.mean(lengths)) if lengths else 0.0,
        "response/truncated": float(np.mean(truncated)) if truncated else 0.0,
        "groups/kept": len(rollout.kept),
        "groups/issued": len(rollout.groups),
        "samples/failed": sum(s.state == "failed" for s in rollout.samples),
        "samples/trained": sum(s.state == "trained" for s in rollout.samples),
    }
    values |= {f"reward/{name}": mean for name, mean in part_means(samples).items()}
    return values


def domain_metrics(domain: str, rollout: RolloutBatch, samples: Sequence[Sample]) -> dict[str, float]:
    """The metrics of a domain in a step. A mean over nothing is left out."""
    groups = [group for group in rollout.groups if group.task.domain == domain]
    domain_samples = [sample for sample in samples if sample.task.domain == domain]
    values: dict[str, float] = {
        "groups_kept": sum(group.task.domain == domain for group in rollout.kept),
        "groups_issued": len(groups),
        "failed": sum(sample.state == "failed" for group in groups for sample in group.samples),
    }
    if rewards := [s.reward for s in domain_samples if s.state != "failed"]:
        values["reward"] = fmean(rewards)
    if domain_samples:
        values["tokens_mean"] = fmean(s.response_tokens for s in domain_samples)
        values["truncated"] = fmean(s.finish == "length" for s in domain_samples)
    values |= {f"reward/{name}": mean for name, mean in part_means(domain_samples).items()}
    values |= _dropped(rollout.dropped_by_domain.get(domain, {}))
    return {f"domain/{domain}/{name}": value for name, value in values.items()}


def staleness_metrics(rollout: RolloutBatch) -> dict[str, float]:
    """Staleness of the batch, and the bias of its lengths."""
    values = {"rollout/length_bias": rollout.length_bias}
    if ages := rollout.ages:
        values |= {"staleness/mean": float(np.mean(ages)), "staleness/max": max(ages)}
    return values | _dropped(rollout.dropped)


def _dropped(by_reason: Mapping[str, int]) -> dict[str, float]:
    """Dropped groups by the kind of the reason: what comes before its details."""
    kinds: Counter[str] = Counter()
    for reason, count in by_reason.items():
        kinds[f"dropped/{reason.partition(':')[0]}"] += count
    return dict(kinds)
