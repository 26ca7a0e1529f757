"""Reward-model inference: the trainer's micro-batches, one score per conversation, no training.

Invariant: a conversation's score is that of the model for this conversation alone, up to rounding. With `exact` it is
equal to the bit, whatever else is scored: each conversation is then computed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from roll.config.schema import TrainConfig
from roll.data.batch import Batch
from roll.data.tokenlog import FloatArray, IntArray
from roll.model.classifier import without_padding
from roll.strategy.offload import Residency, TensorOffloader
from roll.strategy.train.forward import ForwardRunner
from roll.strategy.train.microbatch import MicroBatch
from roll.strategy.train.work_split import OneProcess, WorkSplit

SETTING = "roles.reward_model.micro_batch_tokens"


class RewardModelTrainer:
    """The computation of a reward-model strategy. The strategy that inherits from it decides where parameters are
    stored."""

    def __init__(self, model: PreTrainedModel, split: WorkSplit, runner: ForwardRunner, *, exact: bool = False) -> None:
        """`model` is a decoder with a head `score` of one output."""
        self.model = model
        self._head: nn.Module = model.score
        self._split, self._runner, self._exact = split, runner, exact

    def scores(self, conversations: Sequence[IntArray]) -> FloatArray:
        """fp32 scores, one per conversation, each of at least two tokens."""
        if not self._exact:
            return self._scores(conversations)
        return np.concatenate([self._scores([ids]) for ids in conversations])

    @torch.no_grad()
    def _scores(self, conversations: Sequence[IntArray]) -> FloatArray:
        batch = _batch([without_padding(ids, self.model.config) for ids in conversations])
        self._runner.prepare(batch)
        result = self._runner.attempt(batch, lambda: self._all_scores(batch))
        self._runner.warn_of_retries()
        return result

    def _all_scores(self, batch: Batch) -> FloatArray:
        result, share = np.zeros(len(batch), np.float32), self._split.share(batch)
        members = np.arange(len(batch)) if share.samples is None else share.samples
        for micro, real in self._split.in_lockstep(self._runner.over(share.batch)):
            found = self._split.forward(partial(self._read, micro))
            if real:
                result[members[micro.members]] = found.cpu().numpy()
        if self._split.ranks == 1:
            return result
        return np.asarray(self._split.sum(torch.from_numpy(result).to(self._split.device)).cpu().numpy(), np.float32)

    def _read(self, micro: MicroBatch) -> Tensor:
        rows = self._split.rows(micro)
        scores: Tensor = self._head(rows.ends(self._runner.hidden(rows.micro)))[:, 0].float()
        return scores


class RewardModelStrategy(RewardModelTrainer):
    """A reward model in one process on one device."""

    def __init__(self, model: PreTrainedModel, config: TrainConfig, *, exact: bool = False) -> None:
        runner = ForwardRunner(model, config, setting=SETTING)
        super().__init__(model, OneProcess(model.device), runner, exact=exact)
        self._offloader = TensorOffloader(model.device)

    def set_residency(self, level: Residency) -> None:
        """Keeps the tensors named by `level` on the device and offloads the rest to host memory."""
        self._offloader.set_residency(level, dict(self.model.named_parameters()), {})

    def close(self) -> None:
        """There is nothing to free: all tensors belong to this process."""


def _batch(conversations: Sequence[IntArray]) -> Batch:
    """The conversations as a batch in which only the last token of each is marked as sampled."""
    offsets = np.cumsum([0, *map(len, conversations)])
    mask = np.zeros(offsets[-1], np.bool_)
    mask[offsets[1:] - 1] = True
    temperature, group = np.ones(len(conversations), np.float32), np.arange(len(conversations))
    ids = np.concatenate(conversations).astype(np.int32)
    return Batch(offsets, {"ids": ids, "loss_mask": mask, "temperature": temperature, "group": group})
