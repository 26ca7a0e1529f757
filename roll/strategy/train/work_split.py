"""How a trainer's work is split: one process does all of it (`OneProcess`), or the ranks of a mesh do
(`sharded.work_split`).

Invariants: every token's weight in the loss comes from the whole batch. Each rank computes its share of the samples, and
the sums over ranks equal the sums of a single process. All ranks do the same operations in the same order.
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
    """Indices of their tokens in the whole batch."""
    samples: Indices | None = None
    """Their indices in the whole batch; None if they are all of it."""
    imbalance: float | None = None
    """How much longer the slowest rank computes than the mean; None with one process."""


class SplitRows(Protocol):
    """The packed tokens of a micro-batch that this process computes."""

    @property
    def micro(self) -> MicroBatch:
        """The micro-batch with only these packed tokens and the predictions from them."""
        ...

    def tokens(self, values: Tensor) -> Tensor:
        """Values of all tokens of the micro-batch, from the values predicted from this process's packed tokens."""
        ...

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the processes that have the other packed tokens, in place."""
        ...

    def ends(self, hidden: Tensor) -> Tensor:
        """The hidden state of each sample's last packed token, without gradients."""
        ...


class WorkSplit(Protocol):
    @property
    def device(self) -> torch.device: ...

    @property
    def ranks(self) -> int:
        """Number of data-parallel parts of the samples; several processes may compute one part together."""
        ...

    @property
    def noise(self) -> int:
        """A seed offset that is equal on all processes that compute the same packed tokens, so that they apply the same
        dropout."""
        ...

    def share(self, batch: Batch) -> RankShare: ...

    def in_lockstep(self, micros: Iterator[MicroBatch]) -> Iterator[tuple[MicroBatch, bool]]:
        """The micro-batches, each with whether it is one of this process's own. A rank with fewer micro-batches than
        another continues with dummy ones that do not count, so that all make the same number of passes."""
        ...

    def forward(self, run: Callable[[], T]) -> T:
        """The result of `run`, which computes with the model's parameters."""
        ...

    def rows(self, micro: MicroBatch) -> SplitRows: ...

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the parts, in place."""
        ...

    def sum_rows(self, tensor: Tensor) -> Tensor:
        """The sum over all packed tokens of all parts, in place; a process may have only some packed tokens of a part."""
        ...

    def gathered(self, value: T) -> list[T]:
        """The value of each part, in order."""
        ...


class AllRows:
    """This process computes all packed tokens of a micro-batch."""

    def __init__(self, micro: MicroBatch) -> None:
        self.micro = micro

    def tokens(self, values: Tensor) -> Tensor:
        return values

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def ends(self, hidden: Tensor) -> Tensor:
        return hidden[self.micro.ends]


class OneProcess:
    """This process computes the whole batch."""

    ranks, noise = 1, 0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def share(self, batch: Batch) -> RankShare:
        return RankShare(batch)

    def in_lockstep(self, micros: Iterator[MicroBatch]) -> Iterator[tuple[MicroBatch, bool]]:
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
