"""The state of a run between steps: what a checkpoint stores besides weights, and the source of the summary."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roll.config.errors import UserError
from roll.config.evaluation import HELD_OUT
from roll.scheduler.evaluate import Evaluation, SetEvaluation, measure_of


@dataclass
class State:
    """The counters that every pipeline has."""

    step: int = 0
    """Finished training steps; also the version of the weights."""
    seconds: float = 0.0
    """Run time since the start, without the time between a stop and a resume."""
    seconds_training: float = 0.0
    trained_samples: int = 0

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def summary(self) -> dict[str, Any]:
        """The run's results so far."""
        return {
            "seconds": round(self.seconds, 3),
            "seconds_training": round(self.seconds_training, 3),
            "trained_samples": self.trained_samples,
        }


@dataclass
class Measurement:
    """An evaluation's results, as far as the summary contains them."""

    step: int
    reward: float
    sets: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """Per set: `reward`, `pass@4` …, and the bounds of their intervals, `reward_low`, `reward_high` …"""
    domains: dict[str, float] = field(default_factory=dict)
    """Mean rewards by domain, if there are several."""
    parts: dict[str, float] = field(default_factory=dict)
    """Means of the parts of held-out rewards; an episode's `success` and `turns` are among them."""
    answers: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, step: int, evaluation: Evaluation) -> Measurement:
        return cls(
            step,
            evaluation.reward,
            {name: estimate_values(found) for name, found in evaluation.sets.items()},
            {name: score.reward for name, score in evaluation.domains.items()},
            evaluation.parts,
            [dataclasses.asdict(answer) for answer in evaluation.answers],
        )


def estimate_values(found: SetEvaluation) -> dict[str, float | None]:
    """The estimates of a set and the bounds of their intervals, under their names in metrics and summaries."""
    values: dict[str, float | None] = {}
    for name, estimate in found.estimates.items():
        values |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    return values


@dataclass
class RLVRState(State):
    """The state of a run with rollouts."""

    scheduler: dict[str, Any] = field(default_factory=dict)
    """The rollout scheduler's own state."""
    algorithm: dict[str, Any] = field(default_factory=dict)
    """The algorithm's own state."""
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Models that the run uses but does not train, by role: their identity when the run began."""
    idle_steps: int = 0
    """Consecutive steps without a group to train on."""
    reward: float = 0.0
    """Mean reward of the last step."""
    seconds_generating: float = 0.0
    generated_tokens: int = 0
    before: Measurement | None = None
    """The first evaluation of held-out tasks; None if there are none."""
    latest: Measurement | None = None
    """The latest evaluation."""
    other_rewards: list[str] = field(default_factory=list)
    """Sets in which a reward other than 0 and 1 occurred."""

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> RLVRState:
        """The state saved in a checkpoint, or the initial state if `saved` is empty. Raises `UserError` if another
        version of ROLL wrote entries that this version does not know."""
        values = _of_first_version(saved)
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(values.keys() - known):
            raise UserError(
                f"the checkpoint was written by another version of ROLL: its state has {', '.join(unknown)}, which this "
                "version does not know. Resume the run with that version, or write run.dir=OTHER model=RUN for a new run "
                "from its weights"
            )
        for name in ("before", "latest"):
            if isinstance(values.get(name), Mapping):
                values[name] = Measurement(**values[name])
        return cls(**values)

    def evaluated(self, evaluation: Evaluation) -> Evaluation:
        """Stores the evaluation and returns it. A set's mean reward is called accuracy only if every reward of the set so
        far in the run was 0 or 1."""
        for name, set_evaluation in evaluation.sets.items():
            if not set_evaluation.binary:
                self.saw_other_rewards(name)
        sets = {
            name: dataclasses.replace(set_evaluation, binary=name not in self.other_rewards)
            for name, set_evaluation in evaluation.sets.items()
        }
        evaluation = dataclasses.replace(evaluation, sets=sets)
        self.latest = Measurement.of(self.step, evaluation)
        if self.before is None:
            self.before = self.latest
        return evaluation

    def saw_other_rewards(self, name: str = HELD_OUT) -> None:
        """Notes that a reward of a set was neither 0 nor 1. Training rewards count for the run's held-out tasks too."""
        self.other_rewards = sorted({*self.other_rewards, name})

    @property
    def evaluated_step(self) -> int:
        """Step of the latest evaluation, -1 before the first."""
        return -1 if self.latest is None else self.latest.step

    @property
    def measure(self) -> str:
        """The name of the held-out tasks' mean reward: accuracy or reward."""
        sets = self.latest.sets if self.latest else {HELD_OUT: {}}
        return measure_of(not any(name in self.other_rewards for name in sets))

    def summary(self) -> dict[str, Any]:
        before, latest = self.before, self.latest
        after = latest if self.evaluated_step == self.step else None
        found = super().summary() | {
            "seconds_generating": round(self.seconds_generating, 3),
            "generated_tokens": self.generated_tokens,
            "measure": self.measure,
            "measures": {name: measure_of(name not in self.other_rewards) for name in (latest.sets if latest else {})},
            "reward_before": before and before.reward,
            "reward_before_step": before and before.step,
            "reward_after": after and after.reward,
            "reward_last": latest and latest.reward,
            "reward_last_step": latest and latest.step,
            "answers_before": before.answers if before else [],
            "answers_after": after.answers if after else [],
        }
        for name in ("sets", "domains", "parts"):
            if before and getattr(before, name):
                found |= {f"{name}_before": getattr(before, name), f"{name}_after": getattr(after, name) if after else {}}
        return found


def _of_first_version(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved state under today's names. The first version called every mean reward an accuracy and did not record
    whether it was one."""
    values = dict(saved)
    if "accuracy_step" not in values:
        return values
    reward, reward_before = values.pop("accuracy"), values.pop("accuracy_before")
    latest = {"step": values.pop("accuracy_step"), "reward": reward}
    before = {"step": 0, "reward": reward_before}
    for name in ("domains", "parts", "answers"):
        latest[name], before[name] = values.pop(name, {}), values.pop(f"{name}_before", {})
    if reward is not None:
        values |= {"before": before, "latest": latest, "other_rewards": [HELD_OUT]}
        before["sets"], latest["sets"] = ({HELD_OUT: {"reward": found["reward"]}} for found in (before, latest))
    return values


@dataclass
class SFTState(State):
    """The state of supervised fine-tuning."""

    corpus: str = ""
    """Digest of the training samples."""
    trained_tokens: int = 0
    loss_before: float | None = None
    """Held-out loss of the first evaluation."""
    loss: float | None = None
    evaluated_step: int = -1

    def summary(self) -> dict[str, Any]:
        measured = self.loss is not None
        return super().summary() | {
            "trained_tokens": self.trained_tokens,
            "loss_before": self.loss_before,
            "loss_before_step": 0 if measured else None,
            "loss_after": self.loss if self.evaluated_step == self.step else None,
            "loss_last": self.loss,
            "loss_last_step": self.evaluated_step if measured else None,
        }
