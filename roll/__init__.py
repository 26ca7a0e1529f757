"""ROLL: reinforcement learning of language models.

The names below are the public interface. They are loaded when first used, so that `import roll` costs nothing.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from roll.config.lazy import lazily
from roll.config.version import __version__ as __version__

if "OMP_WAIT_POLICY" not in os.environ:
    # Torch's threads (of GNU OpenMP, which reads this when it is loaded) spin for milliseconds while they wait for each
    # other. With that, two processes that share cores block each other and are twenty times as slow.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if TYPE_CHECKING:
    from roll.algorithm import Algorithm, LossSpec, make_algorithm
    from roll.api import evaluate, play, train
    from roll.cluster import Cluster
    from roll.config import Config, RunError, UserError, load_config
    from roll.data import Batch, Chat, Response, Sample, Task, TokenLog
    from roll.pipeline.prepare import check
    from roll.pipeline.rlvr import make_scheduler
    from roll.pipeline.roles import Roles, TrainRoles, start_roles, start_trainer
    from roll.pipeline.state import RLVRState
    from roll.rollout.lifecycle import Lifecycle
    from roll.scheduler.scheduler import RolloutScheduler
    from roll.workers.infer import InferWorker
    from roll.workers.publish import publish
    from roll.workers.reward import RewardWorker
    from roll.workers.train import TrainWorker

_HOMES = {
    "roll.algorithm": ("Algorithm", "LossSpec", "make_algorithm"),
    "roll.api": ("evaluate", "play", "train"),
    "roll.cluster": ("Cluster",),
    "roll.config": ("Config", "RunError", "UserError", "load_config"),
    "roll.data": ("Batch", "Chat", "Response", "Sample", "Task", "TokenLog"),
    "roll.pipeline.prepare": ("check",),
    "roll.pipeline.rlvr": ("make_scheduler",),
    "roll.pipeline.roles": ("Roles", "TrainRoles", "start_roles", "start_trainer"),
    "roll.pipeline.state": ("RLVRState",),
    "roll.rollout.lifecycle": ("Lifecycle",),
    "roll.scheduler.scheduler": ("RolloutScheduler",),
    "roll.workers.infer": ("InferWorker",),
    "roll.workers.publish": ("publish",),
    "roll.workers.reward": ("RewardWorker",),
    "roll.workers.train": ("TrainWorker",),
}

__all__ = [
    "Algorithm",
    "Batch",
    "Chat",
    "Cluster",
    "Config",
    "InferWorker",
    "Lifecycle",
    "LossSpec",
    "RLVRState",
    "Response",
    "RewardWorker",
    "Roles",
    "RolloutScheduler",
    "RunError",
    "Sample",
    "Task",
    "TokenLog",
    "TrainRoles",
    "TrainWorker",
    "UserError",
    "check",
    "evaluate",
    "load_config",
    "make_algorithm",
    "make_scheduler",
    "play",
    "publish",
    "start_roles",
    "start_trainer",
    "train",
]

__getattr__ = lazily(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
