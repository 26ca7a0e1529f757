"""The configuration of a run: one strict YAML file, dotted overrides, and errors that say what to write instead.

    config = load_config("examples/addition.yaml", ["train.lr=1e-5", "model=runs/a"])

Importing this package loads no numeric library, so a bad configuration is refused within a second. What needs pydantic is
loaded when first used: the processes of environments and graders start often, and need the errors only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll.config.errors import RunError, UserError
from roll.config.lazy import lazily

if TYPE_CHECKING:
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

__getattr__ = lazily(
    __name__,
    {
        "roll.config.load": ("changed_keys", "dump_config", "load_config"),
        "roll.config.schema": tuple(name for name in __all__ if name.endswith("Config") or name == "Section"),
    },
)
