"""What an algorithm is: how rewards become advantages, and which loss trains on them."""

from __future__ import annotations

from typing import Protocol

from roll.algorithm.grpo import GRPO
from roll.algorithm.streams import LossSpec
from roll.config.schema import AlgorithmConfig
from roll.data.batch import Batch


class Algorithm(Protocol):
    @property
    def needs_reference(self) -> bool:
        """Whether batches need the column `ref` before an update."""
        ...

    @property
    def loss(self) -> LossSpec: ...

    def credit(self, batch: Batch) -> Batch:
        """The batch with its column `advantage`: per sample, on the controller."""
        ...


def make_algorithm(config: AlgorithmConfig) -> Algorithm:
    return {"grpo": GRPO}[config.name](config)
