"""Evaluation: held-out tasks answered and judged with the weights as they are.

A run without `eval.sets` has one set, its held-out tasks. Sets are asked at the same time and counted apart.
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
from roll.process.structured_gather import together
from roll.rollout.lifecycle import Lifecycle
from roll.scheduler.estimate import MeanEstimate, majority_at, mean_of, pass_at
from roll.scheduler.rollout_pool import RolloutPool

PRIORITY = 1
"""Held-out samples go before those to train on, so that they are of one version as far as can be."""
_ROUNDING = 1e-9
"""What a sum of parts may lack of the reward from which on a task is solved."""


@dataclass(frozen=True)
class EvalAnswer:
    """A question, what the model said and what that was worth."""

    question: str
    answer: str
    reward: float
    set: str = HELD_OUT
    """The set that the question is of."""


@dataclass(frozen=True)
class EvalScore:
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
    def of(cls, samples: Sequence[Sample]) -> EvalScore | None:
        """None if not one of them could be judged."""
        scored = [sample for sample in samples if sample.state == "scored"]
        if not scored:
            return None
        reward = sum(s.reward for s in scored) / len(scored)
        tokens = sum(s.response_tokens for s in scored) / len(scored)
        return cls(reward, tokens, len(samples), len(samples) - len(scored), part_means(scored), is_binary(scored))


@dataclass(frozen=True)
class EvalFailure:
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
class SetEvaluation:
    """What was found on one set of tasks."""

    name: str
    """As in `eval.sets`; `held_out` for the run's held-out tasks."""
    tasks: int
    """Tasks that were asked."""
    attempts: int
    """Answers to each of them; 0 where that differs from task to task."""
    samples: int
    """Answers in all."""
    failed: int
    """Answers that could not be judged; they count nowhere else."""
    temperature: float
    solved_at: float
    """The reward from which on an attempt has solved its task."""
    reward: MeanEstimate
    """The mean reward; of a run with domains, the mean over its domains."""
    binary: bool
    """Whether every reward was 0 or 1."""
    pass_at: dict[int, MeanEstimate]
    """By k, over the tasks that were judged k times or more."""
    majority_at: dict[int, MeanEstimate]
    tokens_mean: float
    parts: dict[str, float] = field(default_factory=dict)
    domains: dict[str, EvalScore] = field(default_factory=dict)
    """Where there are several, and for each that could be judged."""
    failures: list[EvalFailure] = field(default_factory=list)
    answers: list[EvalAnswer] = field(default_factory=list)
    """Some of them, to show."""

    @property
    def measure(self) -> str:
        """What the mean reward is called."""
        return measure_of(self.binary)

    @property
    def estimates(self) -> dict[str, MeanEstimate]:
        """All of them by name: `reward`, `pass@4`, `maj@8`."""
        passed = {f"pass@{k}": estimate for k, estimate in self.pass_at.items()}
        return {"reward": self.reward} | passed | {f"maj@{k}": estimate for k, estimate in self.majority_at.items()}

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = asdict(self) | {"measure": self.measure}
        for name in ("pass_at", "majority_at"):
            found[name] = {str(k): estimate for k, estimate in found[name].items()}
        return found

    def lines(self) -> Iterator[str]:
        """All that was found, for a person."""
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
        """How the answers were drawn, what was found in each domain, and what went wrong."""
        yield f"  temperature {self.temperature:g}, {self.tokens_mean:.1f} tokens per answer{parts_text(self.parts)}"
        for name, s in self.domains.items():
            yield f"  {name}: {s.reward:.3f} over {s.samples} answers, {s.failed} failed{parts_text(s.parts)}"
        yield from (f"  {failure}" for failure in self.failures)


@dataclass(frozen=True)
class Evaluation:
    """What was found on all sets."""

    sets: dict[str, SetEvaluation]
    """By name; `held_out` alone where the config names none."""
    step: int | None = None
    """Training steps of the weights, as far as a run made them."""
    model: str = ""

    @property
    def reward(self) -> float:
        """The mean over the sets of their mean rewards."""
        return fmean(found.reward.value for found in self.sets.values())

    @property
    def binary(self) -> bool:
        """Whether every reward was 0 or 1."""
        return all(found.binary for found in self.sets.values())

    @property
    def accuracy(self) -> float | None:
        """The mean reward where every reward was 0 or 1, else None."""
        return self.reward if self.binary else None

    @property
    def name(self) -> str:
        """What the mean reward is called."""
        return f"held-out {measure_of(self.binary)}"

    @property
    def samples(self) -> int:
        return sum(found.samples for found in self.sets.values())

    @property
    def failed(self) -> int:
        return sum(found.failed for found in self.sets.values())

    @property
    def tokens_mean(self) -> float:
        """Over all answers that could be judged."""
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
        """Of the only set; empty where there are several."""
        return self._only.parts if self._only is not None else {}

    @property
    def domains(self) -> dict[str, EvalScore]:
        """Of the only set; empty where there are several."""
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
        """`by_domain`: of the run's held-out tasks, every domain gets as many questions, and counts as much. `labels` are
        the domains of sets' tasks, by the tasks' ids."""
        self._pool = pool
        self._config = config
        self._lifecycle = Lifecycle(None)
        self._by_domain = by_domain
        self._labels = labels or {}
        self._sets: dict[str, list[list[Task]]] = {}
        """The tasks of each set, in lists that are asked in turn."""
        found: dict[str, dict[str, list[Task]]] = {name: {} for name in config.sets}
        for task in sorted(tasks, key=lambda task: seed_of("eval", task.id)):
            name = set_of(task.domain)
            pools = found.setdefault(name, {})
            pools.setdefault(task.domain if by_domain and name == HELD_OUT else "", []).append(task)
        for name, pools in found.items():
            self._sets[name] = [pools[domain] for domain in sorted(pools)]

    async def evaluate(self, step: int) -> Evaluation | None:
        """Asks every set's tasks as the config says: the same ones every time, with noise of the step's own. None without
        held-out tasks."""
        if not self._sets:
            return None
        sets = {name: self._samples(name, step) for name in self._sets}
        samples = [sample for asked in sets.values() for sample in asked]
        for sample in samples:
            self._lifecycle.move(sample, "queued")
        try:
            await together(self._pool.run(s.id, [s], self._lifecycle, priority=PRIORITY) for s in samples)
            return Evaluation({name: await self._judged(name, asked) for name, asked in sets.items()}, step)
        finally:
            await self._pool.tokens.release(samples)

    def _samples(self, name: str, step: int) -> list[Sample]:
        settings = self._config.settings(name)
        prefix = f"eval.{step}" if name == HELD_OUT else f"eval.{step}.{name}"
        asked = questions(self._sets[name], settings)
        votes = bool(settings.majority_at)
        return [
            Sample(f"{prefix}.{i}", task, i, settings.temperature, records=False, votes=votes)
            for i, task in enumerate(asked)
        ]

    async def _judged(self, name: str, samples: list[Sample]) -> SetEvaluation:
        whole, settings = EvalScore.of(samples), self._config.settings(name)
        if whole is None:
            where = "" if name == HELD_OUT else f" of eval.sets.{name}"
            raise RunError(f"no held-out answer{where} could be judged; the first reason: {samples[0].reason}")
        domains = self._scores(samples)
        apart = self._by_domain and name == HELD_OUT
        scored = [sample for sample in samples if sample.state == "scored"]
        strata = [
            list(_by_task(sample for sample in scored if not apart or sample.task.domain == domain).values())
            for domain in (domains if apart else [""])
        ]
        return SetEvaluation(
            name=name,
            tasks=len({sample.task.id for sample in samples}),
            attempts=settings.attempts,
            samples=len(samples),
            failed=whole.failed,
            temperature=settings.temperature,
            solved_at=settings.solved_at,
            reward=mean_of([[[s.reward for s in task] for task in tasks] for tasks in strata], shares=whole.binary),
            binary=whole.binary,
            pass_at=_of_tasks(strata, settings.pass_at, lambda task, k: _pass_at(task, k, settings.solved_at)),
            majority_at=_of_tasks(
                strata, settings.majority_at, lambda task, k: _majority_at(task, k, settings.solved_at)
            ),
            tokens_mean=whole.tokens_mean,
            parts=whole.parts,
            domains=domains if apart or len(domains) > 1 else {},
            failures=failures_of(samples),
            answers=await self._shown(name, samples, settings.attempts),
        )

    async def _shown(self, name: str, samples: Sequence[Sample], attempts: int) -> list[EvalAnswer]:
        """The first answer to each of the first questions."""
        first = samples[:: attempts or 1][: self._config.show]
        shown = [s for s in first if s.finish is not None and self._pool.tokens.locate(s) is not None]
        texts = await self._pool.tokens.texts(shown)
        return [
            EvalAnswer(s.task.question or s.task.id, text, s.reward, name) for s, text in zip(shown, texts, strict=True)
        ]

    def _scores(self, samples: Sequence[Sample]) -> dict[str, EvalScore]:
        """By domain, those of which something could be judged."""
        domains: dict[str, list[Sample]] = {}
        for sample in samples:
            domains.setdefault(self._labels.get(sample.task.id, sample.task.domain), []).append(sample)
        scores = {name: EvalScore.of(domains[name]) for name in sorted(domains)}
        return {name: score for name, score in scores.items() if score is not None}


def questions(pools: Sequence[Sequence[Task]], settings: EvalSettings) -> list[Task]:
    """The tasks to ask, as often as each is to be answered; the pools take turns. Without `attempts`, `samples`
    questions, every task (of a pool) equally often give or take one; with them, every task that is asked so often."""
    if not settings.attempts and settings.samples:
        turns = (divmod(number, len(pools)) for number in range(settings.samples))
        return [pools[which][turn % len(pools[which])] for turn, which in turns]
    attempts = settings.attempts or 1
    in_turn = (pool[turn] for turn in range(max(map(len, pools))) for pool in pools if turn < len(pool))
    asked = islice(in_turn, settings.samples // attempts if settings.samples else None)
    return [task for task in asked for _ in range(attempts)]


def _by_task(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    tasks: dict[str, list[Sample]] = {}
    for sample in samples:
        tasks.setdefault(sample.task.id, []).append(sample)
    return tasks


def _of_tasks(
    strata: Sequence[Sequence[Sequence[Sample]]], ks: Sequence[int], of: Callable[[Sequence[Sample], int], float]
) -> dict[int, MeanEstimate]:
    """What each task that was judged k times or more makes of a k, in the mean; a k is left out if no task was."""
    found: dict[int, MeanEstimate] = {}
    for k in sorted(set(ks)):
        values = [[[of(task, k)] for task in tasks if len(task) >= k] for tasks in strata]
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
    """What a mean reward is called: `accuracy` only where every reward is 0 or 1."""
    return "accuracy" if binary else "reward"


def is_binary(samples: Iterable[Sample]) -> bool:
    """Whether every reward is 0 or 1."""
    return all(sample.reward in (0.0, 1.0) for sample in samples)


def failures_of(samples: Sequence[Sample]) -> list[EvalFailure]:
    """What went wrong, by domain and kind."""
    sizes = Counter(sample.task.domain for sample in samples)
    reasons: dict[tuple[str, str], list[str]] = {}
    for sample in samples:
        if sample.state == "failed":
            reasons.setdefault((sample.task.domain, sample.reason.partition(":")[0]), []).append(sample.reason)
    return [EvalFailure(domain, kind, len(said), sizes[domain], said[0]) for (domain, kind), said in reasons.items()]


def part_means(samples: Sequence[Sample]) -> dict[str, float]:
    """Each part of the rewards, over the samples that have it: parts may be of some domains only."""
    parts: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.parts.items():
            parts.setdefault(name, []).append(value)
    return {name: fmean(values) for name, values in parts.items()}


def parts_text(parts: dict[str, float]) -> str:
    return "".join(f", {name} {value:.3f}" for name, value in parts.items())
