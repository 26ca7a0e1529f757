"""Statistics of environments that can be added over workers and subtracted over time."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class EnvStats:
    """Calls by how they ended, and the current number of episodes."""

    resets: int = 0
    steps: int = 0
    finished: int = 0
    """Episodes that reached their last step."""
    raised: int = 0
    deadline: int = 0
    crashed: int = 0
    invalid: int = 0
    lost: int = 0
    restarts: int = 0
    """Processes replaced."""
    reset_s: float = 0.0
    step_s: float = 0.0
    """Seconds spent inside the environments, over all answered calls."""
    open: int = 0
    """Episodes open now, including those that wait for a slot."""
    waiting: int = 0

    @property
    def reset_mean_s(self) -> float:
        return self.reset_s / max(self.resets, 1)

    @property
    def step_mean_s(self) -> float:
        return self.step_s / max(self.steps, 1)

    def __add__(self, other: EnvStats) -> EnvStats:
        return EnvStats(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def since(self, earlier: EnvStats) -> EnvStats:
        """The counts since `earlier`, and the current number of episodes."""
        counted = [each.name for each in fields(self) if each.name not in ("open", "waiting")]
        return replace(self, **{name: getattr(self, name) - getattr(earlier, name) for name in counted})

    def metrics(self) -> dict[str, float]:
        """As a run records them; latencies only if there were calls."""
        values: dict[str, float] = {
            "environments/failed": self.raised + self.deadline + self.crashed + self.invalid,
            "environments/deadlines": self.deadline,
            "environments/lost": self.lost,
            "environments/restarts": self.restarts,
        }
        if self.resets:
            values["environments/reset_s"] = self.reset_mean_s
        if self.steps:
            values["environments/step_s"] = self.step_mean_s
        return values
