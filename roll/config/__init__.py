"""The configuration of a run: one strict YAML file, dotted overrides, and errors that say what to write instead.

    config = load_config("examples/addition.yaml", ["train.lr=1e-5", "model=runs/a"])

Importing this package loads no numeric library, so a bad configuration is refused within a second.
"""

from roll.config.errors import RunError, UserError
from roll.config.load import changed_keys, dump_config, load_config
from roll.config.schema import (
    AlgorithmConfig,
    Config,
    EvalConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    Section,
    TasksConfig,
    TrainConfig,
)

__all__ = [
    "AlgorithmConfig",
    "Config",
    "EvalConfig",
    "ModelConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "RunError",
    "Section",
    "TasksConfig",
    "TrainConfig",
    "UserError",
    "changed_keys",
    "dump_config",
    "load_config",
]
