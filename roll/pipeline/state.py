"""The state of a run between steps: what a checkpoint holds besides weights, and what the summary is made of."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from roll.rollout.evaluate import Evaluation


@dataclass
class State:
    """What every pipeline counts."""

    step: int = 0
    """Finished training steps, which is also the version of the weights."""
    seconds: float = 0.0
    """Spent since the run began, stops in between left out."""
    seconds_training: float = 0.0
    trained_samples: int = 0

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def summary(self) -> dict[str, Any]:
        """What came of the run so far."""
        return {
            "seconds": round(self.seconds, 3),
            "seconds_training": round(self.seconds_training, 3),
            "trained_samples": self.trained_samples,
        }


@dataclass
class RunState(State):
    """The state of a run with rollouts."""

    scheduler: dict[str, Any] = field(default_factory=dict)
    """Where the rollout scheduler goes on, as it says itself."""
    algorithm: dict[str, Any] = field(default_factory=dict)
    """What the algorithm remembers, as it says itself."""
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Models that it uses and does not train, by role: what was found under their names when it began."""
    idle_steps: int = 0
    """Steps in a row that had no group with signal."""
    reward: float = 0.0
    """Mean of the last step."""
    seconds_generating: float = 0.0
    generated_tokens: int = 0
    accuracy_before: float | None = None
    accuracy: float | None = None
    accuracy_step: int = -1
    domains_before: dict[str, float] = field(default_factory=dict)
    """Accuracies by domain, where there are several."""
    domains: dict[str, float] = field(default_factory=dict)
    parts_before: dict[str, float] = field(default_factory=dict)
    """Means of the parts of held-out rewards; an episode's `success` and `turns` are among them."""
    parts: dict[str, float] = field(default_factory=dict)
    answers_before: list[dict[str, Any]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)

    def evaluated(self, evaluation: Evaluation) -> None:
        answers = [dataclasses.asdict(answer) for answer in evaluation.answers]
        self.domains = {name: score.accuracy for name, score in evaluation.domains.items()}
        self.parts = evaluation.parts
        if self.accuracy_before is None:
            self.accuracy_before, self.answers_before = evaluation.accuracy, answers
            self.domains_before, self.parts_before = self.domains, self.parts
        self.accuracy, self.answers, self.accuracy_step = evaluation.accuracy, answers, self.step

    def summary(self) -> dict[str, Any]:
        by_domain = {"domains_before": self.domains_before, "domains_after": self.domains} if self.domains else {}
        return (
            super().summary()
            | by_domain
            | ({"parts_before": self.parts_before, "parts_after": self.parts} if self.parts else {})
            | {
                "seconds_generating": round(self.seconds_generating, 3),
                "generated_tokens": self.generated_tokens,
                "accuracy_before": self.accuracy_before,
                "accuracy_after": self.accuracy,
                "answers_before": self.answers_before,
                "answers_after": self.answers,
            }
        )


@dataclass
class SFTState(State):
    """The state of supervised fine-tuning."""

    corpus: str = ""
    """Digest of the samples it trains on."""
    trained_tokens: int = 0
    loss_before: float | None = None
    """Held out."""
    loss: float | None = None
    evaluated_step: int = -1

    def summary(self) -> dict[str, Any]:
        return super().summary() | {
            "trained_tokens": self.trained_tokens,
            "loss_before": self.loss_before,
            "loss_after": self.loss,
        }
