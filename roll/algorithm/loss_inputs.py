"""The inputs of a loss: per-token tensors of sampled tokens, and the weights that turn token losses into one number.

The three log-probs of a token: `behaviour`, the sampler's when it sampled the token; `proximal`, the trainer's before
this batch's first update; `current`, the trainer's now, the only one with a gradient. All are under softmax(logits /
temperature).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from roll.data.batch import Batch

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"]
Level = Literal["token", "turn", "sequence"]
Estimator = Literal["k1", "k2", "k3", "abs"]


@dataclass(frozen=True)
class CreditSpec:
    """How advantages of samples become advantages of tokens."""

    kind: Literal["sample", "returns", "gae"] = "sample"
    discount: float = 1.0
    gae_lambda: float = 1.0
    kl_coef: float = 0.0
    """Weight of a KL penalty at each token, for `returns` and `gae`."""
    kl_estimator: Estimator = "k1"
    whiten: bool = False
    clip: float | None = None


@dataclass(frozen=True)
class CorrectionSpec:
    """Importance weights from the sampler's to the trainer's log-probs."""

    mode: Literal["truncated", "masked"] = "truncated"
    level: Level = "token"
    low: float = 0.0
    cap: float = 2.0


@dataclass(frozen=True)
class LossSpec:
    """Which loss with which parameters: a name of `roll.algorithm.losses`, or user code as `module:name`.

    It is sent to the trainers instead of a closure.
    """

    name: str
    params: dict[str, Any] = field(default_factory=dict)
    aggregation: Aggregation = "token_mean"
    length: int = 0
    """The divisor of `fixed_length`."""
    credit: CreditSpec = CreditSpec()
    correction: CorrectionSpec | None = None
    kl_coef: float = 0.0
    kl_estimator: Estimator = "k3"
    entropy_coef: float = 0.0
    root: str = field(default="", compare=False)
    """The folder that user code is imported from."""

    @property
    def wants_entropy(self) -> bool:
        """Whether entropies need a gradient."""
        return self.entropy_coef > 0


@dataclass(frozen=True)
class LossInputs:
    """Sampled tokens of a micro-batch, one value each, sample after sample. Samples are always complete."""

    current: Tensor
    proximal: Tensor
    behaviour: Tensor
    advantage: Tensor
    sample: Tensor
    """Index of the token's sample within the micro-batch."""
    turn: Tensor
    """Index of the token's turn within the micro-batch; turns of different samples have different indices."""
    ref: Tensor | None = None
    entropy: Tensor | None = None

    def segments(self, level: Level) -> Tensor | None:
        """The index of each token's segment; None if every token is its own segment."""
        return {"token": None, "turn": self.turn, "sequence": self.sample}[level]


def sum_within(values: Tensor, segments: Tensor) -> Tensor:
    """For each value, the sum over its segment. Segment indices are below the number of values."""
    return torch.zeros_like(values).index_add(0, segments, values)[segments]


def mean_within(values: Tensor, segments: Tensor) -> Tensor:
    return sum_within(values, segments) / sum_within(torch.ones_like(values), segments)


@dataclass(frozen=True)
class TokenLoss:
    """A loss per token, and metrics with one value per token each."""

    values: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


def token_weights(batch: Batch, aggregation: Aggregation, length: int = 0) -> NDArray[np.float64]:
    """The weight of every token in the step's loss: the loss is the sum of weight × token loss.

    The weights are computed from the whole step, before it is split into micro-batches or over ranks, so the split cannot
    change the loss. With S samples that have sampled tokens, and n of them in the token's own sample: `token_mean` 1 /
    all sampled tokens, `sequence_mean` 1 / (S n), `sequence_sum` 1 / S, `fixed_length` 1 / (S length).
    """
    mask = batch.loss_mask.astype(np.float64)
    if aggregation == "token_mean":
        return np.asarray(mask / max(mask.sum(), 1.0))
    sampled = batch.sum_tokens(mask)
    samples = max(int((sampled > 0).sum()), 1)
    if aggregation == "sequence_mean":
        return np.asarray(mask * np.repeat(1.0 / (np.maximum(sampled, 1.0) * samples), batch.lengths))
    if aggregation == "fixed_length" and length < 1:
        raise ValueError(f"aggregation fixed_length needs a length, got {length}")
    return np.asarray(mask / (samples * (length if aggregation == "fixed_length" else 1)))
