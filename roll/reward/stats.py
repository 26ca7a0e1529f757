"""Statistics of graders that can be added over workers and subtracted over time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Latency:
    """Total seconds and count of an operation."""

    count: int = 0
    seconds: float = 0.0

    @property
    def mean_s(self) -> float:
        return self.seconds / max(self.count, 1)

    def __add__(self, other: Latency) -> Latency:
        return Latency(self.count + other.count, self.seconds + other.seconds)

    def __sub__(self, other: Latency) -> Latency:
        return Latency(self.count - other.count, self.seconds - other.seconds)


@dataclass(slots=True)
class LatencySum:
    """A latency that is still being added up."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds

    def so_far(self) -> Latency:
        return Latency(self.count, self.seconds)


@dataclass(frozen=True)
class RoleStats:
    """A role's answers, its missing answers, and the maximum number of requests that waited for it at once."""

    answers: Latency = Latency()
    """Time from when the role got the request."""
    waits: Latency = Latency()
    """Time until the role got the request."""
    unanswered: int = 0
    most_waiting: int = 0

    def __add__(self, other: RoleStats) -> RoleStats:
        return RoleStats(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def metrics(self, role: str) -> dict[str, float]:
        values: dict[str, float] = {f"{role}/unanswered": self.unanswered, f"{role}/queue": self.most_waiting}
        if self.answers.count:
            values |= {f"{role}/answer_s": self.answers.mean_s, f"{role}/wait_s": self.waits.mean_s}
        return values


@dataclass(frozen=True)
class GraderStats:
    """Attempts at verdicts by how they ended (a retried job counts each time), cache hits, and replaced processes."""

    scored: int = 0
    raised: int = 0
    deadline: int = 0
    crashed: int = 0
    invalid: int = 0
    unanswered: int = 0
    hits: int = 0
    restarts: int = 0
    verdicts: Latency = Latency()
    """Time inside the reward function."""
    latency: Mapping[str, Latency] = field(default_factory=dict)
    """Per domain: `DOMAIN/verdict` inside the reward function, `DOMAIN/wait` for a grader, `DOMAIN/part/PART`."""
    roles: Mapping[str, RoleStats] = field(default_factory=dict)
    """Statistics of the roles that scored parts of rewards."""

    @property
    def mean_s(self) -> float:
        """Mean seconds per verdict, inside the reward function."""
        return self.verdicts.mean_s

    def __add__(self, other: GraderStats) -> GraderStats:
        names = {**self.latency, **other.latency}
        latency = {name: self.latency.get(name, Latency()) + other.latency.get(name, Latency()) for name in names}
        role_names = {**self.roles, **other.roles}
        roles = {role: self.roles.get(role, RoleStats()) + other.roles.get(role, RoleStats()) for role in role_names}
        return GraderStats(**{name: a + b for name, a, b in self._paired_counts(other)}, latency=latency, roles=roles)

    def __sub__(self, earlier: GraderStats) -> GraderStats:
        """The statistics since `earlier`; those of roles are left out."""
        latency = {name: latency_now - earlier.latency.get(name, Latency()) for name, latency_now in self.latency.items()}
        return GraderStats(**{name: a - b for name, a, b in self._paired_counts(earlier)}, latency=latency)

    def metrics(self) -> dict[str, float]:
        """As a run records them; latencies only if there were any."""
        judged = self.scored + self.hits
        values: dict[str, float] = {
            "graders/verdict_s": self.mean_s,
            "graders/failed": self.raised + self.deadline + self.crashed + self.invalid + self.unanswered,
            "graders/restarts": self.restarts,
            "graders/cache_hits": self.hits / judged if judged else 0.0,
        }
        for role, stats in self.roles.items():
            values |= stats.metrics(role)
        return values | {f"graders/{name}_s": mean.mean_s for name, mean in self.latency.items() if mean.count}

    def _paired_counts(self, other: GraderStats) -> list[tuple[str, Any, Any]]:
        names = [each.name for each in fields(self) if each.name not in ("latency", "roles")]
        return [(name, getattr(self, name), getattr(other, name)) for name in names]
