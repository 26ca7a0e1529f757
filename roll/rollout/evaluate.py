"""Evaluation: held-out tasks answered and judged with the weights as they are."""

from __future__ import annotations

from dataclasses import dataclass

from roll.child.together import together
from roll.config.errors import RunError
from roll.config.schema import EvalConfig
from roll.data.sample import Sample
from roll.data.task import Task
from roll.engine.request import seed_of
from roll.rollout.lifecycle import Lifecycle
from roll.rollout.pool import RolloutPool

PRIORITY = 1
"""Held-out samples go before those to train on, so that they are of one version as far as can be."""


@dataclass(frozen=True)
class Answer:
    """A question, what the model said and whether that was right."""

    question: str
    answer: str
    reward: float


@dataclass(frozen=True)
class Evaluation:
    """The mean reward over held-out answers, which is the accuracy where a reward is 0 or 1."""

    accuracy: float
    tokens_mean: float
    answers: list[Answer]
    """Some of them, to show."""
    failed: int
    samples: int
    temperature: float

    def __str__(self) -> str:
        return (
            f"held-out accuracy {self.accuracy:.3f} over {self.samples} answers at temperature {self.temperature:g}, "
            f"{self.tokens_mean:.1f} tokens an answer, {self.failed} failed"
        )


class Evaluator:
    def __init__(self, tasks: tuple[Task, ...], pool: RolloutPool, config: EvalConfig) -> None:
        self._tasks = tasks
        self._pool = pool
        self._config = config
        self._lifecycle = Lifecycle(None)

    async def evaluate(self, step: int) -> Evaluation | None:
        """Answers `samples` questions, every task equally often give or take one. None without held-out tasks."""
        if not self._tasks:
            return None
        order = sorted(self._tasks, key=lambda task: seed_of("eval", task.id))
        samples = [
            Sample(f"eval.{step}.{i}", order[i % len(order)], i, self._config.temperature)
            for i in range(self._config.samples)
        ]
        for sample in samples:
            self._lifecycle.move(sample, "queued")
        try:
            await together(self._pool.run(s.id, [s], self._lifecycle, priority=PRIORITY) for s in samples)
            return await self._judged(samples)
        finally:
            await self._pool.tokens.forget(samples)

    async def _judged(self, samples: list[Sample]) -> Evaluation:
        scored = [sample for sample in samples if sample.state == "scored"]
        if not scored:
            raise RunError(f"no held-out answer could be judged; the first reason: {samples[0].reason}")
        shown = [
            s for s in samples[: self._config.show] if s.finish is not None and self._pool.tokens.home_of(s) is not None
        ]
        texts = await self._pool.tokens.texts(shown)
        answers = [Answer(s.task.question, text, s.reward) for s, text in zip(shown, texts, strict=True)]
        return Evaluation(
            accuracy=sum(s.reward for s in scored) / len(scored),
            tokens_mean=sum(s.response_tokens for s in scored) / len(scored),
            answers=answers,
            failed=len(samples) - len(scored),
            samples=len(samples),
            temperature=self._config.temperature,
        )
