"""What a trainer can do, however it is made parallel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

from roll.algorithm.loss_inputs import CreditSpec, LossSpec
from roll.data.batch import Batch
from roll.data.tokenlog import FloatArray, IntArray
from roll.strategy.offload import Level
from roll.weight_sync.stream import TensorSource


@dataclass(frozen=True)
class NotFinite:
    """Where an update was not finite: samples by their loss or its slope, parameters by their gradients. Neither where
    only a sum of finite numbers was too large."""

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
    """What an update did. `metrics`, as a trainer gives them, are means over the step's sampled tokens."""

    loss: float
    grad_norm: float
    lr: float
    rows: int
    """Tokens computed, a shared prefix once."""
    tokens: int
    """Tokens of the batch."""
    updates: int
    skipped: int
    """Updates whose loss or gradient was not finite; the weights were left as they were."""
    not_finite: NotFinite = NotFinite()
    """Of the skipped updates."""
    metrics: dict[str, float] = field(default_factory=dict)
    untrained: tuple[str, ...] = ()
    """Samples that were in skipped updates and in no other."""
    micro_batch_tokens: int = 0
    """Tokens a micro-batch may have at the end of it."""
    oom_retries: int = 0
    """Passes since the last update that were done again with smaller micro-batches, for want of memory."""

    @classmethod
    def nothing(cls, tokens: int, untrained: tuple[str, ...] = ()) -> UpdateStats:
        """Of a step that left the model as it was."""
        return cls(loss=0.0, grad_norm=0.0, lr=0.0, rows=0, tokens=tokens, updates=0, skipped=0, untrained=untrained)

    def beside(self, name: str, other: UpdateStats) -> UpdateStats:
        """These stats with another's loss, gradient and metrics among the metrics, under its name."""
        theirs = {"loss": other.loss, "grad_norm": other.grad_norm, "skipped": float(other.skipped), **other.metrics}
        theirs |= {"micro_batch_tokens": other.micro_batch_tokens, "oom_retries": other.oom_retries}
        return self.with_metrics({f"{name}_{key}": value for key, value in theirs.items()})

    def with_memory(self, micro_batch_tokens: int, oom_retries: int) -> UpdateStats:
        """These stats, with how the work was cut for the device's memory."""
        return replace(self, micro_batch_tokens=micro_batch_tokens, oom_retries=oom_retries)

    def with_metrics(self, metrics: Mapping[str, float]) -> UpdateStats:
        """These stats, with more among their metrics."""
        return replace(self, metrics={**self.metrics, **metrics})


class Kept(Protocol):
    """What every trainer can do with its parameters and moments. Over several ranks each of these is called on all."""

    def hold(self, level: Level) -> None:
        """Keeps so much on the device and the rest in host memory."""
        ...

    def save(self, folder: Path) -> None:
        """Begins to write everything that resuming needs: the model in `folder/model`, the optimizer beside it. What is
        written is what the values are when this returns."""
        ...

    def saved(self) -> dict[str, str]:
        """Waits until this process has written what `save` began: the digests of its files, by their names in the
        folder, as far as it has computed them."""
        ...

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote, into the parameters' own storage."""
        ...

    def close(self) -> None:
        """Frees what the trainer holds beyond its tensors."""
        ...


class TrainStrategy(Kept, Protocol):
    """A trainer of a policy; frozen, a reference."""

    def log_probs(self, batch: Batch, *, base: bool = False) -> FloatArray:
        """The log-probs of the sampled tokens under the current weights, 0 elsewhere: one value per token. Of the `base`
        they are under the weights that adapters began with."""
        ...

    def update(self, batch: Batch, loss: LossSpec, step: int) -> UpdateStats:
        """Trains on the batch once."""
        ...

    def published(self) -> Mapping[str, Tensor] | TensorSource:
        """The tensors that engines are sent, as they are now."""
        ...

    def probe(self) -> tuple[Tensor, Tensor]:
        """A fixed prompt, and the log-probs of its tokens after the first."""
        ...


class ValueStrategy(Kept, Protocol):
    """A trainer of a critic."""

    def values(self, batch: Batch) -> FloatArray:
        """What is predicted from the state before each sampled token, 0 elsewhere."""
        ...

    def update(self, batch: Batch, credit: CreditSpec, step: int) -> UpdateStats:
        """Trains on the batch's returns."""
        ...


class RewardStrategy(Protocol):
    """A model that scores."""

    def scores(self, conversations: Sequence[IntArray]) -> FloatArray:
        """fp32, one per conversation."""
        ...

    def hold(self, level: Level) -> None:
        """Keeps so much on the device and the rest in host memory."""
        ...

    def close(self) -> None:
        """Frees what it holds beyond its tensors."""
        ...
