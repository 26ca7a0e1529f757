"""The state of a run between steps: what a checkpoint holds besides weights, and what the summary is made of."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from roll.rollout.evaluate import Evaluation


@dataclass
class RunState:
    step: int = 0
    """Finished training steps, which is also the version of the weights."""
    scheduler: dict[str, Any] = field(default_factory=dict)
    """Where the rollout scheduler goes on, as it says itself."""
    algorithm: dict[str, Any] = field(default_factory=dict)
    """What the algorithm remembers, as it says itself."""
    idle_steps: int = 0
    """Steps in a row that had no group with signal."""
    reward: float = 0.0
    """Mean of the last step."""
    seconds: float = 0.0
    """Spent since the run began, stops in between left out."""
    seconds_generating: float = 0.0
    seconds_training: float = 0.0
    generated_tokens: int = 0
    trained_samples: int = 0
    accuracy_before: float | None = None
    accuracy: float | None = None
    accuracy_step: int = -1
    answers_before: list[dict[str, Any]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)

    def evaluated(self, evaluation: Evaluation) -> None:
        answers = [dataclasses.asdict(answer) for answer in evaluation.answers]
        if self.accuracy_before is None:
            self.accuracy_before, self.answers_before = evaluation.accuracy, answers
        self.accuracy, self.answers, self.accuracy_step = evaluation.accuracy, answers, self.step

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
