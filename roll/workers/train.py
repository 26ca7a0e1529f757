"""The training role: the actor, and with frozen weights the reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from roll.algorithm.streams import LossSpec
from roll.cluster import Dispatch, Place, Worker, parallel
from roll.config.schema import Config
from roll.data.batch import Batch
from roll.data.columns import Indices, TokenColumn
from roll.model.loading import choose_dtype, find_model, load_model, load_tokenizer
from roll.strategy.train.base import UpdateStats
from roll.strategy.train.single import SingleStrategy
from roll.transfer.weights import Weights
from roll.workers.setup import set_up_process


def _join_tokens(results: Sequence[TokenColumn], parts: Sequence[Indices], whole: Batch) -> TokenColumn:
    return TokenColumn.joined(results, parts)


class TrainWorker(Worker):
    def __init__(self, place: Place, config: Config, *, trainable: bool = True) -> None:
        super().__init__(place)
        set_up_process(place, config.deterministic)
        source = find_model(config.model.path)
        model = load_model(source, choose_dtype(config.model.dtype, place.device), config.seed).to(place.device)
        tokenizer = load_tokenizer(source, config.model)
        self._strategy = SingleStrategy(model, tokenizer, config.train, trainable=trainable)

    @parallel(Dispatch.DATA, join=_join_tokens)
    def log_probs(self, batch: Batch) -> TokenColumn:
        """One value a token: the log-prob of each sampled token under the current weights, 0 elsewhere."""
        return TokenColumn.flat(self._strategy.log_probs(batch), batch.offsets)

    @parallel(Dispatch.ONE)
    def update(self, batch: Batch, loss: LossSpec, step: int) -> UpdateStats:
        """Trains on the batch at training step `step`, counted from 0."""
        return self._strategy.update(batch, loss, step)

    @parallel(Dispatch.ONE)
    def weights(self, version: int) -> Weights:
        return self._strategy.weights(version)

    @parallel(Dispatch.ONE)
    def save(self, folder: Path) -> None:
        self._strategy.save(folder)

    @parallel(Dispatch.ALL)
    def load(self, folder: Path) -> None:
        self._strategy.load(folder)

    async def close(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
