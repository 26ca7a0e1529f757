"""The critic's role: a model that predicts what a sample will still earn, from the state before each token."""

from __future__ import annotations

from pathlib import Path

from roll.algorithm.streams import CreditSpec
from roll.cluster import Dispatch, Place, parallel
from roll.config.schema import Config
from roll.data.batch import Batch
from roll.data.columns import TokenColumn
from roll.model.find import find_model
from roll.model.loading import choose_dtype, load_model
from roll.strategy.shelf import Level
from roll.strategy.train.base import UpdateStats
from roll.strategy.train.critic import CriticStrategy
from roll.workers.device import DeviceWorker
from roll.workers.train import join_tokens


class CriticWorker(DeviceWorker):
    def __init__(self, place: Place, config: Config) -> None:
        super().__init__(place, config.deterministic)
        source = find_model(config.model.path)
        model = load_model(source, choose_dtype(config.model.dtype, place.device), config.seed).to(place.device)
        train = config.train.model_copy(update={"lr": config.algorithm.critic_lr})
        self._strategy = CriticStrategy(model, train, config.algorithm.value_clip)

    @parallel(Dispatch.DATA, join=join_tokens)
    def values(self, batch: Batch) -> TokenColumn:
        """One value a token: what is predicted from the state before each sampled token, 0 elsewhere."""
        return TokenColumn.flat(self._strategy.values(batch), batch.offsets)

    @parallel(Dispatch.ONE)
    def update(self, batch: Batch, credit: CreditSpec, step: int) -> UpdateStats:
        """Trains on the returns of a batch whose column `values` is what was predicted, at training step `step`."""
        return self._strategy.update(batch, credit, step)

    @parallel(Dispatch.ALL)
    def hold(self, level: Level) -> None:
        """Keeps so much on the device and lays the rest aside in host memory."""
        self._strategy.hold(level)

    @parallel(Dispatch.ONE)
    def save(self, folder: Path) -> None:
        self._strategy.save(folder / "critic")

    @parallel(Dispatch.ALL)
    def load(self, folder: Path) -> None:
        self._strategy.load(folder / "critic")
