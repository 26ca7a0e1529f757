"""What an engine needs to know of the role it serves: the model, and how much it generates at once."""

from __future__ import annotations

from dataclasses import dataclass

from roll.config.schema import Config, ModelConfig, RoleConfig
from roll.config.workers import RoleModel


@dataclass(frozen=True)
class EngineRole:
    name: str
    model: ModelConfig | RoleModel
    settings: RoleConfig
    max_running: int
    """Requests that run at once."""
    max_new_tokens: int
    """Of a response, for the size of the cache."""
    kv_cache_tokens: int
    """Limit of the cache; 0: as many as requests need."""
    records_routes: bool
    """Whether completions have the experts that each token was routed to."""

    @classmethod
    def of(cls, config: Config, role: str = "actor_infer") -> EngineRole:
        rollout = config.rollout
        if role == "judge":
            judge = config.roles.judge
            return cls(role, judge.model, judge, judge.max_running, rollout.max_new_tokens, 0, False)
        return cls(
            role,
            config.model,
            getattr(config.roles, role),
            rollout.max_running,
            rollout.max_new_tokens,
            rollout.kv_cache_tokens,
            rollout.router_replay,
        )
