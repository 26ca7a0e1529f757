"""The training role: the actor, and with frozen weights the reference."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path as FilePath

import numpy as np
import torch

from roll.algorithm.credit import sample_kl
from roll.algorithm.streams import Estimator, LossSpec
from roll.cluster import Dispatch, Place, parallel
from roll.config.schema import Config
from roll.data.batch import Batch
from roll.data.columns import Array, Indices, TokenColumn
from roll.model.find import find_model
from roll.model.loading import choose_dtype, load_model, load_tokenizer
from roll.model.lora import Adapters
from roll.strategy.shelf import Level
from roll.strategy.train.base import UpdateStats
from roll.strategy.train.single import SingleStrategy
from roll.transfer.broadcast import BroadcastGroup
from roll.transfer.merged import published_tensors
from roll.transfer.stream import Sender
from roll.transfer.weights import Weights
from roll.workers.device import DeviceWorker
from roll.workers.offer import SLOTS, Meeting, Offer, Path


def join_tokens(results: Sequence[TokenColumn], parts: Sequence[Indices], whole: Batch) -> TokenColumn:
    return TokenColumn.joined(results, parts)


def _join_samples(results: Sequence[Array], parts: Sequence[Indices], whole: Batch) -> Array:
    joined = np.zeros(len(whole), np.float64)
    for values, part in zip(results, parts, strict=True):
        joined[part] = values
    return joined


class TrainWorker(DeviceWorker):
    """A worker with a model and its optimizer: it computes log-probabilities and updates the weights."""

    def __init__(self, place: Place, config: Config, *, trainable: bool = True) -> None:
        super().__init__(place, config.deterministic)
        source = find_model(config.model.path)
        model = load_model(source, choose_dtype(config.model.dtype, place.device), config.seed).to(place.device)
        tokenizer = load_tokenizer(source, config.model)
        lora = config.model.adapters if trainable else None
        adapters = Adapters(model, lora, source.base(config.seed), config.seed) if lora is not None else None
        own_steps = config.train.steps - config.algorithm.critic_warmup_steps
        train = config.train.model_copy(update={"steps": own_steps})  # the learning rate's course begins with its first
        self._strategy = SingleStrategy(model, tokenizer, train, trainable=trainable, adapters=adapters)
        self._bucket_bytes = config.weights.bucket_mb << 20
        self._sender: Sender | None = None
        self._group: BroadcastGroup | None = None

    @parallel(Dispatch.DATA, join=join_tokens)
    def log_probs(self, batch: Batch) -> TokenColumn:
        """One value a token: the log-prob of each sampled token under the current weights, 0 elsewhere."""
        return TokenColumn.flat(self._strategy.log_probs(batch), batch.offsets)

    @parallel(Dispatch.DATA, join=join_tokens)
    def base_log_probs(self, batch: Batch) -> TokenColumn:
        """The same under the weights that the adapters began with: they are off meanwhile."""
        return TokenColumn.flat(self._strategy.log_probs(batch, base=True), batch.offsets)

    @parallel(Dispatch.DATA, join=_join_samples)
    def sample_kl(self, batch: Batch, estimator: Estimator) -> Array:
        """One value a sample: the KL of its sampled tokens against column `ref`, summed."""
        return sample_kl(batch, estimator)

    @parallel(Dispatch.ONE)
    def update(self, batch: Batch, loss: LossSpec, step: int) -> UpdateStats:
        """Trains on the batch at training step `step`, counted from 0."""
        return self._strategy.update(batch, loss, step)

    @parallel(Dispatch.ONE)
    def weights(self, version: int) -> Weights:
        """The weights as a version that engines can load and verify."""
        return self._strategy.weights(version)

    @parallel(Dispatch.ONE)
    def offer(self, version: int, path: Path) -> Offer:
        """Announces the weights as they are now; they must stay so until they were sent."""
        sender = self._sending()
        sender.rebind(published_tensors(self._strategy.model))  # a turn elsewhere moves their storage
        weights = self._strategy.weights(version)
        manifest = sender.manifest(version, weights.probe, weights.log_probs)
        return Offer(manifest, None if path == "broadcast" else sender.open(path, SLOTS))

    @parallel(Dispatch.ONE)
    def write_bucket(self, bucket: int) -> None:
        """Writes one bucket of the weights to where the engines read it."""
        self._sending().write(bucket)

    @parallel(Dispatch.ONE)
    def meeting(self, engines: Sequence[int], deadline_s: float) -> Meeting:
        """Where this trainer can be met by the engines of these ranks."""
        ranks = {engine: number + 1 for number, engine in enumerate(engines)}
        return Meeting(BroadcastGroup.host(), BroadcastGroup.free_port(), ranks, deadline_s)

    @parallel(Dispatch.ALL)
    def leave_group(self) -> None:
        """The next broadcast is in a new company."""
        if self._group is not None:
            self._group.close()
            self._group = None

    @parallel(Dispatch.ONE)
    async def send_weights(self, meeting: Meeting) -> None:
        """Sends all buckets to the engines, which must be receiving."""
        if self._group is None:
            self._group = await asyncio.to_thread(meeting.join, 0, self.place.device)
        await asyncio.to_thread(self._sending().broadcast, self._group)

    @parallel(Dispatch.ALL)
    def hold(self, level: Level) -> None:
        """Keeps so much on the device and lays the rest aside in host memory."""
        if self._sender is not None:
            self._sender.let_go()
        self._strategy.hold(level)

    @parallel(Dispatch.ONE)
    def save(self, folder: FilePath) -> None:
        """Writes the model and the optimizer into the folder of a checkpoint."""
        self._strategy.save(folder)

    @parallel(Dispatch.ALL)
    def load(self, folder: FilePath) -> None:
        """Reads the model and the optimizer from the folder of a checkpoint."""
        self._strategy.load(folder)

    def _sending(self) -> Sender:
        if self._sender is None:
            self._sender = Sender(published_tensors(self._strategy.model), self._bucket_bytes)
        return self._sender

    async def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        if self._group is not None:
            self._group.close()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
