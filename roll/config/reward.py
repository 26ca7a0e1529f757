"""The settings of rewards: what an attempt is worth, and the processes that find it out."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator

from roll.config.section import Count, Processes, Seconds, Section, Whole


class RewardPart(Section):
    """One part of a composed reward."""

    short: ClassVar[str | None] = "name"

    name: str
    """A built-in reward, or a function or class: `module:name` or `file.py:name`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the reward."""
    weight: float = 1.0
    """What the part's value is multiplied by in the sum; 0: a gate or a metric only."""
    gate: bool = False
    """Whether this part decides if the others count: where it is closed, the whole reward is `gate_value`."""
    gate_at: float | None = None
    """The gate is closed where the part is below this; `null`: where it is 0 or less."""
    gate_value: float = 0.0
    """The whole reward where the gate is closed; of several closed gates, the lowest."""


class RewardRule(Section):
    """What an attempt is worth: one reward, or a weighted sum of parts behind gates."""

    short: ClassVar[str | None] = "name"

    name: str = "number"
    """A built-in reward such as `number` (the last number is right) or `math` (math-verify), see docs/guides/rewards.md,
    or a function or class: `module:name` or `file.py:name`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the reward."""
    parts: dict[str, RewardPart] = Field(default_factory=dict)
    """In place of `name`: rewards by the names their metrics get, each with a weight, summed up behind gates."""

    @property
    def label(self) -> str:
        """What it is called where one line must do."""
        return " + ".join(self.parts) or self.name

    @property
    def model_roles(self) -> dict[str, str]:
        """The roles whose models give parts of the reward, by the part's name; empty for a whole reward."""
        named = {name: (part.name, part.options) for name, part in self.parts.items()} or {"": (self.name, self.options)}
        return {
            part: name
            for part, (name, options) in named.items()
            if name == "reward_model" or (name == "judge" and not options.get("url"))
        }

    @model_validator(mode="before")
    @classmethod
    def _leave_name_to_parts(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("parts") and "name" not in value:
            return {**value, "name": ""}
        return value

    @model_validator(mode="after")
    def _check_parts(self) -> RewardRule:
        if self.parts and (self.name or self.options):
            raise ValueError(
                f"reward.name is {self.name!r} and reward.parts is set, and each is the whole reward: make the first "
                "one of the parts, or remove it"
            )
        for name, part in self.parts.items():
            if name in ("", "reward") or "/" in name:
                raise ValueError(f"reward.parts has a part named {name!r}: name it by what it looks at, without a slash")
            if not part.gate and (part.gate_at is not None or part.gate_value):
                key = f"reward.parts.{name}.{'gate_at' if part.gate_at is not None else 'gate_value'}"
                raise ValueError(
                    f"{key} is set, but the part is no gate: write reward.parts.{name}.gate=true, or remove it"
                )
        if self.parts and not any(part.weight or part.gate_value for part in self.parts.values()):
            raise ValueError(
                f"reward.parts ({', '.join(self.parts)}) are all of weight 0, so every attempt is worth 0: give the part "
                "that says what an attempt is worth another weight"
            )
        return self


class RewardConfig(RewardRule):
    """How an attempt is judged."""

    workers: Processes = 1
    """Grader processes."""
    deadline_s: Seconds = 10.0
    """Seconds one verdict may take; then its process is killed and replaced."""
    max_attempts: Count = 2
    """Attempts at a verdict when the grader's process hangs or dies."""
    queue: Count = 4096
    """Samples that may wait for verdicts; while there are more, no new ones begin."""
    memory_mb: Whole = 0
    """Memory of a grader process beyond what it starts with, 0 for no limit."""
    cache: Whole = 4096
    """Verdicts kept, so that the same response to the same task is judged once; 0 for none. Only of rewards that say they
    are deterministic, as built-in ones do."""
