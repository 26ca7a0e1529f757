"""Evaluation: generates and scores answers to held-out tasks with the current weights.

A run without `eval.sets` has one set, its held-out tasks. All sets run at the same time and are reported separately.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from statistics import fmean
from typing import Any

from roll.config.errors import RunError
from roll.config.evaluation import HELD_OUT, EvalConfig, EvalSettings, set_of
from roll.data.sample import Sample
from roll.data.task import Task
from roll.engine.request import seed_of
from roll.process.structured_gather import structured_gather
from roll.rollout.lifecycle import Lifecycle
from roll.scheduler.estimate import MeanEstimate, majority_at, mean_of, pass_at
from roll.scheduler.rollout_pool import RolloutPool

PRIORITY = 1
"""Held-out samples get slots before training samples, so that as many as possible are of one version of the weights."""
_ROUNDING = 1e-9
"""Rounding tolerance when a sum of reward parts is compared with `solved_at`."""


@dataclass(frozen=True)
class EvalAnswer:
    """A question, the model's answer and its reward."""

    question: str
    answer: str
    reward: float
    set: str = HELD_OUT
    """The evaluation set of the question."""


@dataclass(frozen=True)
class EvalScore:
    """Scores of the answers to some tasks."""

    reward: float
    """The mean reward."""
    tokens_mean: float
    samples: int
    failed: int
    parts: dict[str, float]
    """Means of the reward parts, and of the metrics of environments, such as `success`."""
    binary: bool = False
    """Whether every reward was 0 or 1, so that their mean is an accuracy."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> EvalScore | None:
        """None if none of them was scored."""
        scored = [sample for sample in samples if sample.state == "scored"]
        if not scored:
            return None
        reward = sum(s.reward for s in scored) / len(scored)
        tokens = sum(s.response_tokens for s in scored) / len(scored)
        return cls(reward, tokens, len(samples), len(samples) - len(scored), part_means(scored), is_binary(scored))


@dataclass(frozen=True)
class EvalFailure:
    """Failed samples of a domain, for reasons of one kind."""

    domain: str
    kind: str
    """`reward raised`, `environment deadline` …"""
    count: int
    of: int
    """All samples of the domain."""
    example: str
    """The full reason of the first one."""

    def __str__(self) -> str:
        return f"{self.count} of {self.of} samples of {self.domain!r} could not be judged: {self.example}"


@dataclass(frozen=True)
class SetEvaluation:
    """The results on one set of tasks."""

    name: str
    """As in `eval.sets`; `held_out` for the run's held-out tasks."""
    tasks: int
    """Number of evaluated tasks."""
    attempts: int
    """Answers per task; 0 if that differs between tasks."""
    samples: int
    """Total number of answers."""
    failed: int
    """Answers that could not be scored; no other number includes them."""
    temperature: float
    solved_at: float
    """Smallest reward that counts as solved."""
    reward: MeanEstimate
    """The mean reward; for the held-out tasks of a run with domains, the mean over its domains."""
    binary: bool
    """Whether every reward was 0 or 1."""
    pass_at: dict[int, MeanEstimate]
    """By k, over the tasks with at least k scored answers."""
    majority_at: dict[int, MeanEstimate]
    tokens_mean: float
    parts: dict[str, float] = field(default_factory=dict)
    domains: dict[str, EvalScore] = field(default_factory=dict)
    """By domain if there are several; only domains with scored answers."""
    failures: list[EvalFailure] = field(default_factory=list)
    answers: list[EvalAnswer] = field(default_factory=list)
    """A few answers, to show."""

    @property
    def measure(self) -> str:
        """Name of the mean reward: `accuracy` or `reward`."""
        return measure_of(self.binary)

    @property
    def estimates(self) -> dict[str, MeanEstimate]:
        """All estimates by name: `reward`, `pass@4`, `maj@8`."""
        passed = {f"pass@{k}": estimate for k, estimate in self.pass_at.items()}
        return {"reward": self.reward} | passed | {f"maj@{k}": estimate for k, estimate in self.majority_at.items()}

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = asdict(self) | {"measure": self.measure}
        for name in ("pass_at", "majority_at"):
            found[name] = {str(k): estimate for k, estimate in found[name].items()}
        return found

    def lines(self) -> Iterator[str]:
        """The results as text."""
        named = "held-out" if self.name == HELD_OUT else self.name
        interval = f", {self.reward.interval}" if self.reward.interval else ""
        answers = f"{self.samples} answers to {self.tasks} tasks, {self.failed} failed"
        yield f"{named} {self.measure} {self.reward.value:.3f} over {answers}{interval}"
        for name, estimate in self.estimates.items():
            if name != "reward":
                few = f", over {estimate.tasks} tasks" if estimate.tasks < self.tasks else ""
                yield f"  {name} {estimate}{few}"
        yield from self.details()

    def details(self) -> Iterator[str]:
        """Text of the sampling temperature, the results per domain, and the failures."""
        yield f"  temperature {self.temperature:g}, {self.tokens_mean:.1f} tokens per answer{parts_text(self.parts)}"
        for name, s in self.domains.items():
            yield f"  {name}: {s.reward:.3f} over {s.samples} answers, {s.failed} failed{parts_text(s.parts)}"
        yield from (f"  {failure}" for failure in self.failures)


@dataclass(frozen=True)
class Evaluation:
    """The results on all sets."""

    sets: dict[str, SetEvaluation]
    """By name; only `held_out` if the config has no `eval.sets`."""
    step: int | None = None
    """Training step of the weights; None if no run trained them."""
    model: str = ""

    @property
    def reward(self) -> float:
        """The mean of the sets' mean rewards."""
        return fmean(found.reward.value for found in self.sets.values())

    @property
    def binary(self) -> bool:
        """Whether every reward was 0 or 1."""
        return all(found.binary for found in self.sets.values())

    @property
    def accuracy(self) -> float | None:
        """The mean reward if every reward was 0 or 1, else None."""
        return self.reward if self.binary else None

    @property
    def name(self) -> str:
        """Name of the mean reward."""
        return f"held-out {measure_of(self.binary)}"

    @property
    def samples(self) -> int:
        return sum(found.samples for found in self.sets.values())

    @property
    def failed(self) -> int:
        return sum(found.failed for found in self.sets.values())

    @property
    def tokens_mean(self) -> float:
        """Mean response tokens of all scored answers."""
        judged = [(found.samples - found.failed, found.tokens_mean) for found in self.sets.values()]
        return sum(count * mean for count, mean in judged) / sum(count for count, _ in judged)

    @property
    def answers(self) -> list[EvalAnswer]:
        return [answer for found in self.sets.values() for answer in found.answers]

    @property
    def failures(self) -> list[EvalFailure]:
        return [failure for found in self.sets.values() for failure in found.failures]

    @property
    def parts(self) -> dict[str, float]:
        """Parts of the only set; empty if there are several sets."""
        return self._only.parts if self._only is not None else {}

    @property
    def domains(self) -> dict[str, EvalScore]:
        """Domains of the only set; empty if there are several sets."""
        return self._only.domains if self._only is not None else {}

    @property
    def _only(self) -> SetEvaluation | None:
        return next(iter(self.sets.values())) if len(self.sets) == 1 else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "pipeline": "rlvr",
            "model": self.model,
            "step": self.step,
            "measure": measure_of(self.binary),
            "reward": self.reward,
            "sets": {name: found.to_dict() for name, found in self.sets.items()},
        }

    def __str__(self) -> str:
        return "\n".join(line for found in self.sets.values() for line in found.lines())


class Evaluator:
    def __init__(
        self,
        tasks: Sequence[Task],
        pool: RolloutPool,
        config: EvalConfig,
        by_domain: bool = False,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """`by_domain`: among the run's held-out tasks, every domain gets the same number of questions and the same
        weight. `labels`: domain of each task of `eval.sets`, by task id."""
        self._pool = pool
        self._config = config
        self._lifecycle = Lifecycle(None)
        self._by_domain = by_domain
        self._labels = labels or {}
        self._sets: dict[str, list[list[Task]]] = {}
        """The tasks of each set, in pools that are used round-robin."""
        found: dict[str, dict[str, list[Task]]] = {name: {} for name in config.sets}
        for task in sorted(tasks, key=lambda task: seed_of("eval", task.id)):
            name = set_of(task.domain)
            pools = found.setdefault(name, {})
            pools.setdefault(task.domain if by_domain and name == HELD_OUT else "", []).append(task)
        for name, pools in found.items():
            self._sets[name] = [pools[domain] for domain in sorted(pools)]

    async def evaluate(self, step: int) -> Evaluation | None:
        """Evaluates every set as configured: the same tasks every time, with different sampling seeds per step. None
        without held-out tasks."""
        if not self._sets:
            return None
        sets = {name: self._samples(name, step) for name in self._sets}
        samples = [sample for answers in sets.values() for sample in answers]
        for sample in samples:
            self._lifecycle.move(sample, "queued")
        try:
            await structured_gather(self._pool.run(s.id, [s], self._lifecycle, priority=PRIORITY) for s in samples)
            return Evaluation({name: await self._evaluate_set(name, answers) for name, answers in sets.items()}, step)
        finally:
            await self._pool.tokens.release(samples)

    def _samples(self, name: str, step: int) -> list[Sample]:
        settings = self._config.settings(name)
        prefix = f"eval.{step}" if name == HELD_OUT else f"eval.{step}.{name}"
        tasks = questions(self._sets[name], settings)
        votes = bool(settings.majority_at)
        return [
            Sample(f"{prefix}.{i}", task, i, settings.temperature, records=False, votes=votes)
            for i, task in enumerate(tasks)
        ]

    async def _evaluate_set(self, name: str, samples: list[Sample]) -> SetEvaluation:
        overall, settings = EvalScore.of(samples), self._config.settings(name)
        if overall is None:
            where = "" if name == HELD_OUT else f" of eval.sets.{name}"
            raise RunError(f"no held-out answer{where} could be judged; the first reason: {samples[0].reason}")
        domains = self._scores(samples)
        by_domain = self._by_domain and name == HELD_OUT
        scored = [sample for sample in samples if sample.state == "scored"]
        strata = [
            list(_by_task(sample for sample in scored if not by_domain or sample.task.domain == domain).values())
            for domain in (domains if by_domain else [""])
        ]
        return SetEvaluation(
            name=name,
            tasks=len({sample.task.id for sample in samples}),
            attempts=settings.attempts,
            samples=len(samples),
            failed=overall.failed,
            temperature=settings.temperature,
            solved_at=settings.solved_at,
            reward=mean_of([[[s.reward for s in task] for task in tasks] for tasks in strata], shares=overall.binary),
            binary=overall.binary,
            pass_at=_estimates_by_k(strata, settings.pass_at, lambda task, k: _pass_at(task, k, settings.solved_at)),
            majority_at=_estimates_by_k(
                strata, settings.majority_at, lambda task, k: _majority_at(task, k, settings.solved_at)
            ),
            tokens_mean=overall.tokens_mean,
            parts=overall.parts,
            domains=domains if by_domain or len(domains) > 1 else {},
            failures=failures_of(samples),
            answers=await self._sample_answers(name, samples, settings.attempts),
        )

    async def _sample_answers(self, name: str, samples: Sequence[Sample], attempts: int) -> list[EvalAnswer]:
        """The first answer to each of the first `eval.show` questions."""
        first = samples[:: attempts or 1][: self._config.show]
        available = [s for s in first if s.finish is not None and self._pool.tokens.locate(s) is not None]
        texts = await self._pool.tokens.texts(available)
        return [
            EvalAnswer(s.task.question or s.task.id, text, s.reward, name)
            for s, text in zip(available, texts, strict=True)
        ]

    def _scores(self, samples: Sequence[Sample]) -> dict[str, EvalScore]:
        """Scores by domain, for domains with at least one scored sample."""
        domains: dict[str, list[Sample]] = {}
        for sample in samples:
            domains.setdefault(self._labels.get(sample.task.id, sample.task.domain), []).append(sample)
        scores = {name: EvalScore.of(domains[name]) for name in sorted(domains)}
        return {name: score for name, score in scores.items() if score is not None}


def questions(pools: Sequence[Sequence[Task]], settings: EvalSettings) -> list[Task]:
    """The tasks to evaluate, each repeated once per answer; the pools are used round-robin. Without `attempts`: `samples`
    questions, with every task of a pool equally often, give or take one. With `attempts`: every chosen task that many
    times."""
    if not settings.attempts and settings.samples:
        rounds = (divmod(number, len(pools)) for number in range(settings.samples))
        return [pools[which][round_number % len(pools[which])] for round_number, which in rounds]
    attempts = settings.attempts or 1
    round_robin = (
        pool[round_number] for round_number in range(max(map(len, pools))) for pool in pools if round_number < len(pool)
    )
    chosen = islice(round_robin, settings.samples // attempts if settings.samples else None)
    return [task for task in chosen for _ in range(attempts)]


def _by_task(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    tasks: dict[str, list[Sample]] = {}
    for sample in samples:
        tasks.setdefault(sample.task.id, []).append(sample)
    return tasks


def _estimates_by_k(
    strata: Sequence[Sequence[Sequence[Sample]]], ks: Sequence[int], estimate: Callable[[Sequence[Sample], int], float]
) -> dict[int, MeanEstimate]:
    """For each k, the mean of `of(task, k)` over the tasks with at least k scored answers; without such tasks k is left
    out."""
    found: dict[int, MeanEstimate] = {}
    for k in sorted(set(ks)):
        values = [[[estimate(task, k)] for task in tasks if len(task) >= k] for tasks in strata]
        if values := [stratum for stratum in values if stratum]:
            answers = sum(len(task) for tasks in strata for task in tasks if len(task) >= k)
            found[k] = mean_of(values, shares=True, answers=answers)
    return found


def _pass_at(task: Sequence[Sample], k: int, solved_at: float) -> float:
    return pass_at(len(task), sum(_solved(sample, solved_at) for sample in task), k)


def _majority_at(task: Sequence[Sample], k: int, solved_at: float) -> float:
    return majority_at([sample.answer for sample in task], [_solved(sample, solved_at) for sample in task], k)


def _solved(sample: Sample, solved_at: float) -> bool:
    return sample.reward >= solved_at - _ROUNDING


def measure_of(binary: bool) -> str:
    """Name of a mean reward: `accuracy` if every reward is 0 or 1, else `reward`."""
    return "accuracy" if binary else "reward"


def is_binary(samples: Iterable[Sample]) -> bool:
    """Whether every reward is 0 or 1."""
    return all(sample.reward in (0.0, 1.0) for sample in samples)


def failures_of(samples: Sequence[Sample]) -> list[EvalFailure]:
    """The failures, by domain and kind."""
    sizes = Counter(sample.task.domain for sample in samples)
    reasons: dict[tuple[str, str], list[str]] = {}
    for sample in samples:
        if sample.state == "failed":
            reasons.setdefault((sample.task.domain, sample.reason.partition(":")[0]), []).append(sample.reason)
    return [EvalFailure(domain, kind, len(texts), sizes[domain], texts[0]) for (domain, kind), texts in reasons.items()]


def part_means(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean of each reward part over the samples that have it: some parts exist in some domains only."""
    parts: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.parts.items():
            parts.setdefault(name, []).append(value)
    return {name: fmean(values) for name, values in parts.items()}


def parts_text(parts: dict[str, float]) -> str:
    return "".join(f", {name} {value:.3f}" for name, value in parts.items())
