"""Which samples made an update that is not finite.

What tokens contributed stays on the device until somebody asks, which is after an update was skipped.
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
        """losses [tokens], and slopes [tokens] of the loss by what the model said."""
        self._seen.append((micro.members, micro.sample, losses.detach(), slopes))

    def guilty(self, batch: Batch) -> tuple[str, ...]:
        """The ids of samples with a token whose loss or slope is not finite, in the order of the batch."""
        found: set[int] = set()
        for members, sample, losses, slopes in self._seen:
            sick = ~losses.isfinite()
            if slopes is not None:
                sick |= ~slopes.isfinite()
            found.update(members[torch.unique(sample[sick]).cpu().numpy()].tolist())
        return tuple(sample_name(batch, index) for index in sorted(found))


def sample_names(batch: Batch) -> tuple[str, ...]:
    return tuple(sample_name(batch, index) for index in range(len(batch)))


def sample_name(batch: Batch, index: int) -> str:
    """The sample's id, or its number where a batch has no ids."""
    return str(batch["sample"][index]) if "sample" in batch else f"number {index}"
