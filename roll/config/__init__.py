"""The configuration of a run: one strict YAML file, dotted overrides, and errors that say what to write instead.

    config = load_config("examples/addition.yaml", ["train.lr=1e-5", "model=runs/a"])

Importing this package loads no numeric library, so a bad configuration is refused within a second. What needs pydantic is
loaded when first used: the processes of environments and graders start often, and need the errors only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from roll.config.errors import RunError, UserError

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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'roll.config' has no attribute {name!r}")
    home = "load" if name in ("changed_keys", "dump_config", "load_config") else "schema"
    return getattr(importlib.import_module(f"roll.config.{home}"), name)
