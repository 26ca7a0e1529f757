"""What a trainer can do, however it is made parallel."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from roll.algorithm.streams import LossSpec
from roll.data.batch import Batch
from roll.data.tokenlog import FloatArray
from roll.strategy.shelf import Level
from roll.transfer.weights import Weights


@dataclass(frozen=True)
class UpdateStats:
    """What an update did. `metrics` are means over the step's sampled tokens."""

    loss: float
    grad_norm: float
    lr: float
    rows: int
    """Tokens computed, a shared prefix once."""
    tokens: int
    """Tokens of the batch."""
    updates: int
    skipped: int
    """Updates whose gradient was not finite; the weights were left as they were."""
    metrics: dict[str, float] = field(default_factory=dict)

    def beside(self, name: str, other: UpdateStats) -> UpdateStats:
        """These stats with another's loss, gradient and metrics among the metrics, under its name."""
        theirs = {"loss": other.loss, "grad_norm": other.grad_norm, "skipped": float(other.skipped), **other.metrics}
        return replace(self, metrics={**self.metrics, **{f"{name}_{key}": value for key, value in theirs.items()}})


class TrainStrategy(Protocol):
    def log_probs(self, batch: Batch, *, base: bool = False) -> FloatArray:
        """The log-probs of the sampled tokens under the current weights, 0 elsewhere: one value a token. Of the `base`
        they are under the weights that adapters began with."""
        ...

    def update(self, batch: Batch, loss: LossSpec, step: int) -> UpdateStats:
        """Trains on the batch once."""
        ...

    def weights(self, version: int) -> Weights:
        """The weights as they are now, to be published as `version`."""
        ...

    def hold(self, level: Level) -> None:
        """Keeps so much on the device and lays the rest aside in host memory."""
        ...

    def save(self, folder: Path) -> None:
        """Writes everything needed to go on: the model in `folder/model`, the optimizer beside it."""
        ...

    def load(self, folder: Path) -> None: ...
