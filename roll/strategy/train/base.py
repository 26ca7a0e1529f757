"""The protocols of the training side of the Parallel Strategy (arXiv 2506.06122): every trainer implements them, on one
device or over several ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from roll.algorithm.loss_inputs import CreditSpec, LossSpec
from roll.data.batch import Batch
from roll.data.tokenlog import FloatArray, IntArray
from roll.strategy.offload import Residency
from roll.weight_sync.stream import TensorSource
from roll.weight_sync.weights import Weights


@dataclass(frozen=True)
class NotFinite:
    """What made an update non-finite: samples with a non-finite loss or loss gradient, and parameters with a non-finite
    gradient. Both are empty if only a reduction over finite numbers overflowed."""

    samples: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()

    def __add__(self, other: NotFinite) -> NotFinite:
        return NotFinite(self.samples + other.samples, self.parameters + other.parameters)

    def __str__(self) -> str:
        kinds = (("the loss of", self.samples), ("the gradient of", self.parameters))
        return (
            " and ".join(f"{what} {_some(names)}" for what, names in kinds if names)
            or "the norm of the gradient, or the loss,"
        )


def _some(names: tuple[str, ...], most: int = 3) -> str:
    distinct = list(dict.fromkeys(names))
    rest = f" and {len(distinct) - most} more" if len(distinct) > most else ""
    return ", ".join(distinct[:most]) + rest


@dataclass(frozen=True)
class UpdateStats:
    """The result of one update, or of all updates of a step. A trainer gives `metrics` as means over the step's sampled
    tokens."""

    loss: float
    grad_norm: float
    lr: float
    rows: int
    """Packed tokens computed; a shared prefix counts once."""
    tokens: int
    """Tokens in the batch."""
    updates: int
    skipped: int
    """Updates skipped because their loss or gradient was not finite; they did not change the weights."""
    not_finite: NotFinite = NotFinite()
    """The samples and parameters that made the skipped updates non-finite."""
    metrics: dict[str, float] = field(default_factory=dict)
    untrained: tuple[str, ...] = ()
    """Samples that were only in skipped updates."""
    micro_batch_tokens: int = 0
    """Largest number of packed tokens per micro-batch when the update ended."""
    oom_retries: int = 0
    """Passes since the last update that were repeated with smaller micro-batches because the device ran out of memory."""

    @classmethod
    def empty(cls, tokens: int, untrained: tuple[str, ...] = ()) -> UpdateStats:
        """The stats of a step that did not change the model."""
        return cls(loss=0.0, grad_norm=0.0, lr=0.0, rows=0, tokens=tokens, updates=0, skipped=0, untrained=untrained)

    def with_prefixed(self, name: str, other: UpdateStats) -> UpdateStats:
        """These stats plus another's loss, gradient norm and metrics, added to `metrics` with the prefix `name_`."""
        prefixed = {"loss": other.loss, "grad_norm": other.grad_norm, "skipped": float(other.skipped), **other.metrics}
        prefixed |= {"micro_batch_tokens": other.micro_batch_tokens, "oom_retries": other.oom_retries}
        return self.with_metrics({f"{name}_{key}": value for key, value in prefixed.items()})

    def with_memory(self, micro_batch_tokens: int, oom_retries: int) -> UpdateStats:
        """These stats with the micro-batch limit and the number of out-of-memory retries."""
        return replace(self, micro_batch_tokens=micro_batch_tokens, oom_retries=oom_retries)

    def with_metrics(self, metrics: Mapping[str, float]) -> UpdateStats:
        """These stats with additional metrics."""
        return replace(self, metrics={**self.metrics, **metrics})


class CheckpointedTrainer(Protocol):
    """Residency and checkpoints: what every trainer does with its parameters and moments. If the trainer has several
    ranks, every rank calls each of these methods."""

    def set_residency(self, level: Residency) -> None:
        """Keeps the tensors named by `level` on the device and offloads the rest to host memory."""
        ...

    def save(self, folder: Path) -> None:
        """Starts writing everything that resuming needs: the model to `folder/model`, the optimizer beside it. The values
        written are those at the time this call returns; later updates do not change them."""
        ...

    def saved(self) -> dict[str, str]:
        """Waits until this process has written the files that `save` started. Returns their digests by file name in the
        folder, for those files whose digest it has computed."""
        ...

    def load(self, folder: Path) -> None:
        """Reads a checkpoint written by `save` into the existing storage of the parameters."""
        ...

    def close(self) -> None:
        """Frees resources other than tensors."""
        ...


class TrainStrategy(CheckpointedTrainer, Protocol):
    """A trainer of a policy. Without an optimizer (frozen) it is the reference."""

    def log_probs(self, batch: Batch, *, base: bool = False) -> FloatArray:
        """Log-probs of the sampled tokens under the current weights, 0 elsewhere: one value per token. With `base`, they
        are computed under the base model's weights, without the adapters."""
        ...

    def update(self, batch: Batch, loss: LossSpec, step: int) -> UpdateStats:
        """Trains on the batch: all updates of one step."""
        ...

    def published(self) -> Mapping[str, Tensor] | TensorSource:
        """The tensors to send to the engines, with their current values."""
        ...

    def probe(self) -> tuple[Tensor, Tensor]:
        """A fixed prompt and the log-probs of its tokens after the first."""
        ...


@runtime_checkable
class SharesWeights(Protocol):
    """What a trainer whose model is whole in its process has besides, for engines in the same process."""

    def weights(self, version: int) -> Weights:
        """The current weights by reference, as a version that an engine can load and verify."""
        ...


class ValueStrategy(CheckpointedTrainer, Protocol):
    """A trainer of a critic."""

    def values(self, batch: Batch) -> FloatArray:
        """Predicted values of the state before each sampled token, 0 elsewhere."""
        ...

    def update(self, batch: Batch, credit: CreditSpec, step: int) -> UpdateStats:
        """Trains on the batch's returns."""
        ...


class RewardStrategy(Protocol):
    """A reward model."""

    def scores(self, conversations: Sequence[IntArray]) -> FloatArray:
        """fp32 scores, one per conversation."""
        ...

    def set_residency(self, level: Residency) -> None:
        """Keeps the tensors named by `level` on the device and offloads the rest to host memory."""
        ...

    def close(self) -> None:
        """Frees resources other than tensors."""
        ...
