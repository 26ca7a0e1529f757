"""The settings of evaluations: which tasks are asked, how often, and what is made of the answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from roll.config.domains import SourceConfig
from roll.config.reward import RewardRule
from roll.config.section import Count, NonNegative, Section, Stops, Whole

HELD_OUT = "held_out"
"""The name of the one set of a run without `eval.sets`: the run's held-out tasks."""
_DOMAIN = "eval/"
Counts = Annotated[tuple[Count, ...], BeforeValidator(lambda value: (value,) if type(value) is int else value)]
"""Numbers; a single one may be written alone."""


def domain_of(name: str) -> str:
    """The domain of a set's tasks. No domain of the config has such a name; tasks to train on are refused with one."""
    return f"{_DOMAIN}{name}"


def set_of(domain: str) -> str:
    """The set whose tasks have this domain."""
    return domain.removeprefix(_DOMAIN) if domain.startswith(_DOMAIN) else HELD_OUT


@dataclass(frozen=True)
class EvalSettings:
    """How one set is evaluated, with nothing left open."""

    samples: int
    attempts: int
    temperature: float
    pass_at: tuple[int, ...]
    majority_at: tuple[int, ...]
    solved_at: float


class EvalSetConfig(SourceConfig):
    """Tasks to evaluate on, under a name. What is null is as `eval` has it."""

    short: ClassVar[str | None] = "source"

    source: str
    """As `tasks.source`. The set has every row of a file or dataset, unless `options.held_out` says which; the held-out
    tasks of any other source."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the source."""
    reward: RewardRule | None = None
    """What an attempt is worth; null: what the run's `reward` says."""
    samples: Whole | None = None
    """Answers in all; 0: every task is asked."""
    attempts: Whole | None = None
    """Answers to each task; 0: as many as make `samples`."""
    temperature: NonNegative | None = None
    """Sampling temperature; 0 is greedy."""
    max_new_tokens: Count | None = None
    """Longest response, in tokens; null: `rollout.max_new_tokens`."""
    stop: Stops | None = None
    """Strings that end a response; null: `rollout.stop`."""
    pass_at: Counts | None = None
    """Values of k for pass@k."""
    majority_at: Counts | None = None
    """Values of k for maj@k."""
    solved_at: float | None = None
    """The reward from which on an attempt has solved its task."""


class EvalConfig(Section):
    """How held-out tasks are evaluated (`docs/guides/evaluation.md`)."""

    every: Whole = 10
    """Steps between evaluations, 0 for only before and after."""
    samples: Whole = 128
    """Answers in all, spread evenly over the held-out tasks; 0: every task is asked once, or `attempts` times."""
    attempts: Whole = 0
    """Answers to each task: `samples / attempts` tasks are asked, or all if there are fewer. 0: as many as make
    `samples`."""
    temperature: NonNegative = 1.0
    """Sampling temperature; 0 is greedy."""
    pass_at: Counts = ()
    """Values of k for pass@k: how often at least one of k attempts at a task solves it. Each needs as many `attempts`."""
    majority_at: Counts = ()
    """Values of k for maj@k: how often the most frequent answer of k attempts is right. Each needs as many `attempts`."""
    solved_at: float = 1.0
    """The reward from which on an attempt has solved its task, for pass@k and maj@k."""
    sets: dict[str, EvalSetConfig] = Field(default_factory=dict)
    """Sets of tasks by name, evaluated in place of the run's own held-out tasks."""
    show: Whole = 3
    """Held-out questions of each set whose answers are shown before and after training."""

    def settings(self, name: str = HELD_OUT) -> EvalSettings:
        """How a set is evaluated."""
        set_config = self.sets.get(name)
        fields = EvalSettings.__dataclass_fields__
        values = {field: None if set_config is None else getattr(set_config, field) for field in fields}
        return EvalSettings(**{f: getattr(self, f) if value is None else value for f, value in values.items()})


def check_evaluation(config: EvalConfig, domains: bool) -> None:
    """`ValueError` where the settings of evaluations do not go together; `domains`: the run has some."""
    for name in config.sets or (HELD_OUT,):
        settings = config.settings(name)
        where = f"eval.sets.{name}" if config.sets else "eval"
        for field, values in (("pass_at", settings.pass_at), ("majority_at", settings.majority_at)):
            if values and max(values) > settings.attempts:
                raise ValueError(
                    f"{where}.{field} has {max(values)}, but {_setting_name(config, name, 'attempts')} is "
                    f"{settings.attempts}: write {where}.attempts={max(values)} or more, or smaller numbers"
                )
        if 0 < settings.samples < settings.attempts:
            raise ValueError(
                f"{_setting_name(config, name, 'samples')} is {settings.samples}, fewer than "
                f"{_setting_name(config, name, 'attempts')}={settings.attempts} at one task: write "
                f"{where}.samples={settings.attempts} or more, or 0 for all tasks"
            )
        if settings.attempts > 1 and settings.temperature == 0:
            raise ValueError(
                f"{_setting_name(config, name, 'temperature')} is 0, where all {settings.attempts} attempts at a task "
                f"are the same: write {where}.temperature=1, or {where}.attempts=1"
            )
    for name, each in config.sets.items():
        if domains and each.reward is None:
            raise ValueError(
                f"eval.sets.{name} has no reward, and the run has one for each of its domains: write "
                f"eval.sets.{name}.reward"
            )


def _setting_name(config: EvalConfig, name: str, field: str) -> str:
    """The setting that decides a field for a set."""
    set_config = config.sets.get(name)
    return f"eval.{field}" if set_config is None or getattr(set_config, field) is None else f"eval.sets.{name}.{field}"
