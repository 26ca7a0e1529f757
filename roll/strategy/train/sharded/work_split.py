"""Splits a trainer's work over the ranks of a mesh: balanced prefix trees, the same number of passes on all ranks, sums
over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from roll.data.batch import Batch
from roll.model.shape import ModelShape
from roll.strategy.train.balance import balance
from roll.strategy.train.microbatch import MicroBatch, sequence
from roll.strategy.train.sharded.context import ContextRows
from roll.strategy.train.sharded.module import TrainModule
from roll.strategy.train.sharded.process_group import RankGroup
from roll.strategy.train.work_split import AllRows, RankShare, SplitRows
from roll.weight_sync.weights import probe_ids

T = TypeVar("T")


class OverRanks:
    """One rank's part of the work; every rank gets the whole batch."""

    def __init__(self, group: RankGroup, module: TrainModule, model: PreTrainedModel, dtype: torch.dtype) -> None:
        """`module` holds the model, sharded over the group's mesh; its layers compute in `dtype`."""
        self.group = group
        self.device, self.ranks, self.noise = group.device, group.shape.data, group.rank // group.shape.tensor
        self._module, self._model, self._dtype = module, model, dtype
        self._shape = ModelShape.of_model(model)
        self._idle_ids = probe_ids(int(model.config.vocab_size)).numpy()[:2]

    def share(self, batch: Batch) -> RankShare:
        if self.ranks == 1:
            return RankShare(batch, imbalance=0.0)
        balanced = balance(batch, self.ranks, self._shape)
        own = balanced.parts[self.group.data_rank]
        return RankShare(batch.select(own), batch.token_indices(own), own, balanced.imbalance)

    def in_lockstep(self, micros: Iterator[MicroBatch]) -> Iterator[tuple[MicroBatch, bool]]:
        if self.ranks == 1:
            yield from ((micro, True) for micro in micros)
            return
        own = list(micros)
        idle = self.group.most(len(own)) - len(own)
        yield from ((micro, True) for micro in own)
        for _ in range(idle):
            yield sequence(self._idle_ids, self._model, self._dtype, self.device), False

    def forward(self, run: Callable[[], T]) -> T:
        found: T = self._module(run)
        return found

    def rows(self, micro: MicroBatch) -> SplitRows:
        context = self.group.meshes.context
        return AllRows(micro) if context is None else ContextRows(micro, context)

    def sum(self, tensor: Tensor) -> Tensor:
        return self.group.sum(tensor)

    def sum_rows(self, tensor: Tensor) -> Tensor:
        return self.group.sum_rows(tensor)

    def gathered(self, value: T) -> list[T]:
        return self.group.gathered(value)
