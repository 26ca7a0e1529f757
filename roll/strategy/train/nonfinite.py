"""Finds the samples that made an update non-finite.

The tokens' losses and gradients stay on the device until `samples` is called, which happens only after a skipped update.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll.data.batch import Batch
from roll.data.remote_columns import Indices
from roll.strategy.train.microbatch import MicroBatch


class NonFiniteTracker:
    def __init__(self) -> None:
        self._seen: list[tuple[Indices, Tensor, Tensor, Tensor | None]] = []

    def add(self, micro: MicroBatch, losses: Tensor, slopes: Tensor | None) -> None:
        """losses [tokens]; slopes [tokens]: the gradients of the loss by the tokens' log-probs (in a critic, by their
        values)."""
        self._seen.append((micro.members, micro.sample, losses.detach(), slopes))

    def samples(self, batch: Batch) -> tuple[str, ...]:
        """The ids of samples with a token whose loss or loss gradient is not finite, in batch order."""
        found: set[int] = set()
        for members, sample, losses, slopes in self._seen:
            nonfinite = ~losses.isfinite()
            if slopes is not None:
                nonfinite |= ~slopes.isfinite()
            found.update(members[torch.unique(sample[nonfinite]).cpu().numpy()].tolist())
        return tuple(sample_name(batch, index) for index in sorted(found))


def sample_names(batch: Batch) -> tuple[str, ...]:
    return tuple(sample_name(batch, index) for index in range(len(batch)))


def sample_name(batch: Batch, index: int) -> str:
    """The sample's id, or its index if the batch has no ids."""
    return str(batch["sample"][index]) if "sample" in batch else f"number {index}"
