"""How a trainer's work is spread: over one process, or over the ranks of a mesh (`sharded.spread`).

What always holds: every token's weight in the loss comes from the whole batch. Each rank computes its share of the
samples, and what ranks add up is what one process would have added up. All ranks do the same things in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from roll.data.batch import Batch
from roll.data.remote_columns import Indices
from roll.strategy.train.microbatch import MicroBatch

T = TypeVar("T")


@dataclass(frozen=True)
class RankShare:
    """The samples of a batch that this process computes."""

    batch: Batch
    tokens: Indices | slice = field(default_factory=lambda: slice(None))
    """Where their tokens are in the whole batch."""
    samples: Indices | None = None
    """Their numbers in the whole batch; None where they are all of it."""
    imbalance: float | None = None
    """How much longer the slowest rank computes than the mean; None where there is one process."""


class SplitRows(Protocol):
    """The rows of a micro-batch that this process computes."""

    @property
    def micro(self) -> MicroBatch:
        """With these rows alone, and the predictions from them."""
        ...

    def tokens(self, values: Tensor) -> Tensor:
        """Values of all tokens of the micro-batch, from those of the predictions from its own rows."""
        ...

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the processes that have the other rows, in place."""
        ...

    def ends(self, hidden: Tensor) -> Tensor:
        """The hidden state of each sample's last row, without gradients."""
        ...


class WorkSplit(Protocol):
    @property
    def device(self) -> torch.device: ...

    @property
    def ranks(self) -> int:
        """Parts that samples are spread over; each may be computed by several processes together."""
        ...

    @property
    def noise(self) -> int:
        """A number of the processes that compute the same rows, by which they draw the same noise."""
        ...

    def share(self, batch: Batch) -> RankShare: ...

    def in_step(self, micros: Iterator[MicroBatch]) -> Iterator[tuple[MicroBatch, bool]]:
        """The micro-batches, each with whether it is one of this process's own: a rank that has fewer than another goes
        on with ones that count for nothing, so that all make the same number of passes."""
        ...

    def forward(self, run: Callable[[], T]) -> T:
        """What `run` computes from the model's parameters."""
        ...

    def rows(self, micro: MicroBatch) -> SplitRows: ...

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the parts, in place."""
        ...

    def sum_rows(self, tensor: Tensor) -> Tensor:
        """The sum over all rows of the parts, in place, where a process may have some rows of a part only."""
        ...

    def gathered(self, value: T) -> list[T]:
        """The value of each part, in order."""
        ...


class AllRows:
    """All rows of a micro-batch are computed here."""

    def __init__(self, micro: MicroBatch) -> None:
        self.micro = micro

    def tokens(self, values: Tensor) -> Tensor:
        return values

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def ends(self, hidden: Tensor) -> Tensor:
        return hidden[self.micro.ends]


class OneProcess:
    """The whole batch is computed here."""

    ranks, noise = 1, 0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def share(self, batch: Batch) -> RankShare:
        return RankShare(batch)

    def in_step(self, micros: Iterator[MicroBatch]) -> Iterator[tuple[MicroBatch, bool]]:
        return ((micro, True) for micro in micros)

    def forward(self, run: Callable[[], T]) -> T:
        return run()

    def rows(self, micro: MicroBatch) -> SplitRows:
        return AllRows(micro)

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def sum_rows(self, tensor: Tensor) -> Tensor:
        return tensor

    def gathered(self, value: T) -> list[T]:
        return [value]
