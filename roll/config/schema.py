"""The configuration of a run: all its sections, and the check that they go together."""

from __future__ import annotations

from pydantic import model_validator

from roll.config.algorithm import AlgorithmConfig
from roll.config.domains import DomainConfig, SourceConfig
from roll.config.evaluation import EvalConfig, EvalSetConfig
from roll.config.reward import RewardConfig, RewardPart, RewardRule
from roll.config.rollout import RolloutConfig
from roll.config.section import Section
from roll.config.settings import (
    DataConfig,
    EnvConfig,
    KeepConfig,
    LoraConfig,
    ModelConfig,
    RunConfig,
    Settings,
    TasksConfig,
    TrainConfig,
)
from roll.config.validation import check
from roll.config.workers import FaultToleranceConfig, RayConfig, RoleConfig, RoleModel, RolesConfig, WeightSyncConfig

__all__ = [
    "AlgorithmConfig",
    "Config",
    "DataConfig",
    "DomainConfig",
    "EnvConfig",
    "EvalConfig",
    "EvalSetConfig",
    "FaultToleranceConfig",
    "KeepConfig",
    "LoraConfig",
    "ModelConfig",
    "RayConfig",
    "RewardConfig",
    "RewardPart",
    "RewardRule",
    "RoleConfig",
    "RoleModel",
    "RolesConfig",
    "RolloutConfig",
    "RunConfig",
    "Section",
    "SourceConfig",
    "TasksConfig",
    "TrainConfig",
    "WeightSyncConfig",
]


class Config(Settings):
    """A whole run."""

    @model_validator(mode="after")
    def _check_across_sections(self) -> Config:
        check(self)
        return self
