"""The critic worker: a value model that predicts the remaining return of a sample from the state before each token."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from roll.algorithm.loss_inputs import CreditSpec
from roll.cluster import Dispatch, WorkerPlacement, dispatch
from roll.config.schema import Config
from roll.data.batch import Batch
from roll.data.remote_columns import TokenColumn
from roll.strategy.offload import Residency
from roll.strategy.registry import trainer_of
from roll.strategy.train.base import UpdateStats, ValueStrategy
from roll.workers.rank_group import GroupWorker
from roll.workers.train import join_tokens

if TYPE_CHECKING:
    from roll.strategy.train.sharded.process_group import RankGroup

FOLDER = "critic"
"""The critic's folder in a checkpoint."""


class CriticWorker(GroupWorker):
    def __init__(self, placement: WorkerPlacement, config: Config) -> None:
        self._config = config
        self._strategy: ValueStrategy | None = None
        super().__init__(placement, config.deterministic)

    def build(self, group: RankGroup | None) -> None:
        self._strategy = trainer_of(self._config, self.placement).critic(self._config, self.placement, group)

    @property
    def strategy(self) -> ValueStrategy:
        """The Parallel Strategy of this rank's part of the critic; available once the ranks have joined their group."""
        assert self._strategy is not None, "the ranks of a role join their process group before they compute"
        return self._strategy

    @dispatch(Dispatch.DATA, join=join_tokens)
    def values(self, batch: Batch) -> TokenColumn:
        """One value per token: the prediction from the state before each sampled token, 0 for other tokens."""
        return TokenColumn.flat(self.strategy.values(batch), batch.offsets)

    @dispatch(Dispatch.ONE)
    def update(self, batch: Batch, credit: CreditSpec, step: int) -> UpdateStats:
        """Trains on the returns of a batch at training step `step`; column `values` has the predictions before it."""
        return self.strategy.update(batch, credit, step)

    @dispatch(Dispatch.ALL)
    def set_residency(self, level: Residency) -> None:
        """Sets the residency level: keeps that much on the device and offloads the rest to host memory."""
        self.strategy.set_residency(level)

    @dispatch(Dispatch.ONE)
    def save(self, folder: Path) -> None:
        self.strategy.save(folder / FOLDER)

    @dispatch(Dispatch.ALL)
    def load(self, folder: Path) -> None:
        self.strategy.load(folder / FOLDER)

    @dispatch(Dispatch.ALL)
    async def saved(self) -> dict[str, str]:
        """Returns once the files that `save` started to write are complete, with their digests."""
        written = await asyncio.to_thread(self.strategy.saved)
        return {f"{FOLDER}/{name}": digest for name, digest in written.items()}

    async def close(self) -> None:
        if self._strategy is not None:
            self._strategy.close()
