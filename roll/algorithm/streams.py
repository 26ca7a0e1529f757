"""What a loss sees: the step's tokens as parallel streams, and how token losses become one number.

The three log-probabilities of a token: `behaviour`, the sampler's when it drew the token; `proximal`, the trainer's
before this batch's first update; `current`, the trainer's now, the only one with a gradient. All are under
softmax(logits / temperature).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from roll.data.batch import Batch

Aggregation = Literal["token_mean", "sequence_mean"]


@dataclass(frozen=True)
class LossSpec:
    """Which loss, with which parameters: a name of `roll.algorithm.losses` or an import path `module:function`.

    It travels to the trainers in place of a closure.
    """

    name: str
    params: dict[str, Any] = field(default_factory=dict)
    aggregation: Aggregation = "token_mean"


@dataclass(frozen=True)
class Streams:
    """Sampled tokens of a micro-batch, one value each."""

    current: Tensor
    proximal: Tensor
    behaviour: Tensor
    advantage: Tensor
    ref: Tensor | None = None


@dataclass(frozen=True)
class TokenLoss:
    """A loss for every token, and what is worth watching, one value a token each."""

    values: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


def token_weights(batch: Batch, aggregation: Aggregation) -> NDArray[np.float64]:
    """The weight of every token in the step's loss, so that the loss is the sum of weight × token loss.

    The weights are fixed by the whole step, before it is cut into micro-batches or ranks; so no cut can change the loss.
    `token_mean`: 1 / all sampled tokens. `sequence_mean`: 1 / (samples × the sample's sampled tokens), samples without a
    sampled token left out of the count.
    """
    mask = batch.loss_mask.astype(np.float64)
    sampled = batch.sum_tokens(mask)
    if aggregation == "token_mean":
        return np.asarray(mask / max(mask.sum(), 1.0))
    samples = max(int((sampled > 0).sum()), 1)
    per_sample = 1.0 / (np.maximum(sampled, 1.0) * samples)
    return np.asarray(mask * np.repeat(per_sample, batch.lengths))
