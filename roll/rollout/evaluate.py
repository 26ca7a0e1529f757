"""Evaluation: held-out tasks answered and judged with the weights as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

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
    """A question, what the model said and what that was worth."""

    question: str
    answer: str
    reward: float


@dataclass(frozen=True)
class Score:
    """What answers to some tasks were worth."""

    reward: float
    """The mean reward."""
    tokens_mean: float
    samples: int
    failed: int
    parts: dict[str, float]
    """Means of what the rewards are made of, and of what environments tell, such as `success`."""
    binary: bool = False
    """Whether every reward was 0 or 1, so that their mean is an accuracy."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Score | None:
        """None if not one of them could be judged."""
        scored = [sample for sample in samples if sample.state == "scored"]
        if not scored:
            return None
        reward = sum(s.reward for s in scored) / len(scored)
        tokens = sum(s.response_tokens for s in scored) / len(scored)
        return cls(reward, tokens, len(samples), len(samples) - len(scored), part_means(scored), is_binary(scored))


@dataclass(frozen=True)
class Failure:
    """Samples of a domain that could not be judged, for reasons of one kind."""

    domain: str
    kind: str
    """`reward raised`, `environment deadline` …"""
    count: int
    of: int
    """All samples of the domain."""
    example: str
    """The first one's reason in full."""

    def __str__(self) -> str:
        return f"{self.count} of {self.of} samples of {self.domain!r} could not be judged: {self.example}"


@dataclass(frozen=True)
class Evaluation:
    """The mean reward over held-out answers; of a run with domains, the mean over its domains."""

    reward: float
    tokens_mean: float
    answers: list[Answer]
    """Some of them, to show."""
    failed: int
    samples: int
    temperature: float
    parts: dict[str, float] = field(default_factory=dict)
    domains: dict[str, Score] = field(default_factory=dict)
    """Where there are several, and for each that could be judged."""
    failures: list[Failure] = field(default_factory=list)
    binary: bool = False
    """Whether every reward was 0 or 1."""

    @property
    def accuracy(self) -> float | None:
        """The mean reward where every reward was 0 or 1, else None."""
        return self.reward if self.binary else None

    @property
    def name(self) -> str:
        """What the mean reward is called."""
        return f"held-out {measure_of(self.binary)}"

    def __str__(self) -> str:
        whole = (
            f"{self.name} {self.reward:.3f} over {self.samples} answers at temperature {self.temperature:g}, "
            f"{self.tokens_mean:.1f} tokens per answer, {self.failed} failed{told(self.parts)}"
        )
        each = (
            f"{name}: {s.reward:.3f} over {s.samples} answers, {s.failed} failed{told(s.parts)}"
            for name, s in self.domains.items()
        )
        return "\n  ".join([whole, *each, *map(str, self.failures)])


class Evaluator:
    def __init__(self, tasks: tuple[Task, ...], pool: RolloutPool, config: EvalConfig, by_domain: bool = False) -> None:
        """`by_domain`: every domain gets as many questions, and counts as much."""
        self._pool = pool
        self._config = config
        self._lifecycle = Lifecycle(None)
        self._by_domain = by_domain
        pools: dict[str, list[Task]] = {}
        for task in sorted(tasks, key=lambda task: seed_of("eval", task.id)):
            pools.setdefault(task.domain if by_domain else "", []).append(task)
        self._pools = [pools[name] for name in sorted(pools)]

    async def evaluate(self, step: int) -> Evaluation | None:
        """Answers `samples` questions, every task (of a domain) equally often give or take one. None without held-out
        tasks."""
        if not self._pools:
            return None
        samples = [
            Sample(f"eval.{step}.{i}", self._question(i), i, self._config.temperature)
            for i in range(self._config.samples)
        ]
        for sample in samples:
            self._lifecycle.move(sample, "queued")
        try:
            await together(self._pool.run(s.id, [s], self._lifecycle, priority=PRIORITY) for s in samples)
            return await self._judged(samples)
        finally:
            await self._pool.tokens.forget(samples)

    def _question(self, number: int) -> Task:
        """Domain by domain, and in each task by task."""
        turn, which = divmod(number, len(self._pools))
        return self._pools[which][turn % len(self._pools[which])]

    async def _judged(self, samples: list[Sample]) -> Evaluation:
        whole = Score.of(samples)
        if whole is None:
            raise RunError(f"no held-out answer could be judged; the first reason: {samples[0].reason}")
        shown = [
            s for s in samples[: self._config.show] if s.finish is not None and self._pool.tokens.home_of(s) is not None
        ]
        texts = await self._pool.tokens.texts(shown)
        answers = [Answer(s.task.question or s.task.id, text, s.reward) for s, text in zip(shown, texts, strict=True)]
        domains = _by_domain(samples)
        return Evaluation(
            reward=fmean(s.reward for s in domains.values()) if self._by_domain else whole.reward,
            tokens_mean=whole.tokens_mean,
            answers=answers,
            failed=whole.failed,
            samples=len(samples),
            temperature=self._config.temperature,
            parts=whole.parts,
            domains=domains if self._by_domain or len(domains) > 1 else {},
            failures=failures_of(samples),
            binary=whole.binary,
        )


def measure_of(binary: bool) -> str:
    """What a mean reward is called: `accuracy` only where every reward is 0 or 1."""
    return "accuracy" if binary else "reward"


def is_binary(samples: Iterable[Sample]) -> bool:
    """Whether every reward is 0 or 1."""
    return all(sample.reward in (0.0, 1.0) for sample in samples)


def _by_domain(samples: Sequence[Sample]) -> dict[str, Score]:
    domains: dict[str, list[Sample]] = {}
    for sample in samples:
        domains.setdefault(sample.task.domain, []).append(sample)
    scores = {name: Score.of(domains[name]) for name in sorted(domains)}
    return {name: score for name, score in scores.items() if score is not None}


def failures_of(samples: Sequence[Sample]) -> list[Failure]:
    """What went wrong, by domain and kind."""
    sizes = Counter(sample.task.domain for sample in samples)
    reasons: dict[tuple[str, str], list[str]] = {}
    for sample in samples:
        if sample.state == "failed":
            reasons.setdefault((sample.task.domain, sample.reason.partition(":")[0]), []).append(sample.reason)
    return [Failure(domain, kind, len(said), sizes[domain], said[0]) for (domain, kind), said in reasons.items()]


def part_means(samples: Sequence[Sample]) -> dict[str, float]:
    """Each part of the rewards, over the samples that have it: parts may be of some domains only."""
    parts: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.parts.items():
            parts.setdefault(name, []).append(value)
    return {name: fmean(values) for name, values in parts.items()}


def told(parts: dict[str, float]) -> str:
    return "".join(f", {name} {value:.3f}" for name, value in parts.items())
