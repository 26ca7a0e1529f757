"""The training worker: the actor, and with frozen weights the reference model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

import numpy as np
import torch

from roll.algorithm.credit import sample_kl
from roll.algorithm.loss_inputs import Estimator, LossSpec
from roll.cluster import Dispatch, WorkerPlacement, dispatch
from roll.config.schema import Config
from roll.data.batch import Batch
from roll.data.remote_columns import Array, Indices, TokenColumn
from roll.strategy.offload import Residency
from roll.strategy.registry import trainer_of
from roll.strategy.train.base import SharesWeights, TrainStrategy, UpdateStats
from roll.weight_sync.broadcast import BroadcastBackend, BroadcastGroup
from roll.weight_sync.rendezvous import SLOTS, Path, Rendezvous, WeightAnnouncement
from roll.weight_sync.stream import Sender
from roll.weight_sync.weights import Weights
from roll.workers.broadcast_membership import BroadcastMember
from roll.workers.rank_group import GroupWorker

if TYPE_CHECKING:
    from roll.strategy.train.sharded.process_group import RankGroup


def join_tokens(results: Sequence[TokenColumn], parts: Sequence[Indices], whole: Batch) -> TokenColumn:
    return TokenColumn.concat(results, parts)


def _join_samples(results: Sequence[Array], parts: Sequence[Indices], whole: Batch) -> Array:
    joined = np.zeros(len(whole), np.float64)
    for values, part in zip(results, parts, strict=True):
        joined[part] = values
    return joined


class TrainWorker(GroupWorker):
    """A worker with a model and its optimizer: it computes log-probabilities and updates the weights."""

    def __init__(self, placement: WorkerPlacement, config: Config, *, trainable: bool = True) -> None:
        self._config, self._trainable = config, trainable
        self._bucket_bytes = config.weight_sync.bucket_mb << 20
        self._strategy: TrainStrategy | None = None
        self._sender: Sender | None = None
        self._member = BroadcastMember()
        super().__init__(placement, config.deterministic)

    def build(self, group: RankGroup | None) -> None:
        backend = trainer_of(self._config, self.placement)
        self._strategy = backend.policy(self._config, self.placement, group, trainable=self._trainable)

    @dispatch(Dispatch.DATA, join=join_tokens)
    def log_probs(self, batch: Batch) -> TokenColumn:
        """One value per token: the log-prob of each sampled token under the current weights, 0 for other tokens."""
        return TokenColumn.flat(self.strategy.log_probs(batch), batch.offsets)

    @dispatch(Dispatch.DATA, join=join_tokens)
    def base_log_probs(self, batch: Batch) -> TokenColumn:
        """The same under the base model's weights, with the adapters disabled."""
        return TokenColumn.flat(self.strategy.log_probs(batch, base=True), batch.offsets)

    @dispatch(Dispatch.DATA, join=_join_samples)
    def sample_kl(self, batch: Batch, estimator: Estimator) -> Array:
        """One value per sample: the KL of its sampled tokens against column `ref`, summed."""
        return sample_kl(batch, estimator)

    @dispatch(Dispatch.ONE)
    def update(self, batch: Batch, loss: LossSpec, step: int) -> UpdateStats:
        """Trains on the batch at training step `step`, counted from 0."""
        return self.strategy.update(batch, loss, step)

    @dispatch(Dispatch.ONE)
    def weights(self, version: int) -> Weights:
        """The weights by reference, as a version that engines in this process can load and verify."""
        assert isinstance(self.strategy, SharesWeights), "only a whole model is shared within a process"
        return self.strategy.weights(version)

    @dispatch(Dispatch.ONE)
    def announce(self, version: int, path: Path) -> WeightAnnouncement:
        """Announces the current weights as a version; they must not change until they have been sent."""
        prompt, log_probs = self.strategy.probe()
        sender = self._weight_sender()
        sender.rebind(self.strategy.published())  # offloading moves their storage
        manifest = sender.manifest(version, prompt, log_probs)
        return WeightAnnouncement(manifest, sender.open(path, SLOTS) if path != "broadcast" and self.is_first else None)

    @dispatch(Dispatch.ONE)
    def write_bucket(self, bucket: int) -> None:
        """Writes one bucket of the weights into the memory that the engines read; other ranks than 0 add their shards."""
        if self.is_first:
            self._weight_sender().write(bucket)
        else:
            self._weight_sender().contribute(bucket)

    @dispatch(Dispatch.ONE)
    def open_rendezvous(self, engines: Sequence[int], backend: BroadcastBackend, deadline_s: float) -> Rendezvous:
        """The rendezvous for a broadcast from this trainer to the engines of these ranks."""
        ranks = {engine: number + 1 for number, engine in enumerate(engines)}
        return Rendezvous(BroadcastGroup.host(), BroadcastGroup.free_port(), ranks, backend, deadline_s)

    @dispatch(Dispatch.ALL)
    async def leave_group(self) -> None:
        """Aborts a broadcast in progress and destroys the process group; the next publish creates a new one."""
        await self._member.leave()

    @dispatch(Dispatch.ONE)
    async def send_weights(self, rendezvous: Rendezvous) -> None:
        """Sends all buckets to the engines, which must be receiving. If an engine dies, the trainer's ranks stay
        synchronized."""
        sender = self._weight_sender()
        if self.is_first:
            join = partial(rendezvous.join, 0, self.placement.device)
            await self._member.broadcast(join, sender.broadcast, sender.contribute_all)
        else:
            await self._member.run_in_thread(sender.contribute_all)

    @dispatch(Dispatch.ALL)
    def set_residency(self, level: Residency) -> None:
        """Sets the residency level: keeps that much on the device and offloads the rest to host memory."""
        if self._sender is not None:
            self._sender.release_tensors()
        self.strategy.set_residency(level)

    @dispatch(Dispatch.ONE)
    def save(self, folder: FilePath) -> None:
        """Starts to write the current model and optimizer state into a checkpoint's folder."""
        self.strategy.save(folder)

    @dispatch(Dispatch.ALL)
    async def saved(self) -> dict[str, str]:
        """Returns once the files that `save` started to write are complete, with their digests."""
        return await asyncio.to_thread(self.strategy.saved)

    @dispatch(Dispatch.ALL)
    def load(self, folder: FilePath) -> None:
        """Reads the model and optimizer state from a checkpoint's folder."""
        self.strategy.load(folder)

    def _weight_sender(self) -> Sender:
        if self._sender is None:
            self._sender = Sender(self.strategy.published(), self._bucket_bytes)
        return self._sender

    @property
    def strategy(self) -> TrainStrategy:
        """The Parallel Strategy of this rank's part of the model; available once the ranks have joined their group."""
        assert self._strategy is not None, "the ranks of a role join their process group before they compute"
        return self._strategy

    async def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._member.close()
        if self._strategy is not None:
            self._strategy.close()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
