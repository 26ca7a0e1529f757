"""The settings of domains: kinds of tasks trained on together, each judged, limited and filtered in its own way."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from roll.config.reward import RewardRule
from roll.config.rollout import RolloutConfig
from roll.config.section import Bound, Count, NonNegative, Positive, Section, Stops


class SourceConfig(Section):
    """Where tasks come from."""

    short: ClassVar[str | None] = "source"

    source: str = ""
    """As `tasks.source`. Empty: the domain's tasks are among those of other domains' sources, which say so."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the source."""


class DomainConfig(Section):
    """Tasks of one kind. What is null is as `rollout` has it."""

    tasks: SourceConfig = SourceConfig()
    weight: NonNegative = 1.0
    """Share of the domain among the groups, relative to the others' weights; 0: it is measured, not trained on."""
    reward: RewardRule = RewardRule()
    max_new_tokens: Count | None = None
    """Longest response, in tokens."""
    temperature: Positive | None = None
    """Sampling temperature; held-out tasks are answered at `eval.temperature` all the same."""
    stop: Stops | None = None
    """Strings that end a response."""
    filter: str | None = None
    """Which finished groups are dropped and replaced."""
    filter_range: tuple[Bound, Bound] | None = None
    """The range of `filter: mean_range`."""

    def rollout(self, common: RolloutConfig) -> RolloutConfig:
        """How the domain's samples are made."""
        overrides = {name: getattr(self, name) for name in OVERRIDES}
        return common.model_copy(update={name: value for name, value in overrides.items() if value is not None})


OVERRIDES = ("max_new_tokens", "temperature", "stop", "filter", "filter_range")
"""Settings of `rollout` that a domain may have for itself."""
