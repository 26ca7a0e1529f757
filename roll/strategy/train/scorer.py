"""Scoring in one process on one device: the trainer's micro-batches, one number a conversation, nothing learned.

What always holds: a conversation's score is what the model itself gives it alone, to rounding; where it must be `exact`,
to the bit, whatever else waits: then each is computed alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from roll.config.schema import TrainConfig
from roll.data.batch import Batch
from roll.data.tokenlog import FloatArray, IntArray
from roll.model.classifier import as_read
from roll.strategy.shelf import Level, Shelf
from roll.strategy.train.passes import Passes


class ScoreStrategy:
    def __init__(self, model: PreTrainedModel, config: TrainConfig, *, exact: bool = False) -> None:
        """`model` is a decoder with a head `score` of one output."""
        self.model = model
        self._head: nn.Module = model.score
        self._passes = Passes(model, config, setting="roles.reward_model.micro_batch_tokens")
        self._exact = exact
        self._shelf = Shelf(model.device)

    def scores(self, conversations: Sequence[IntArray]) -> FloatArray:
        """fp32, one a conversation of at least two tokens that are read."""
        if not self._exact:
            return self._scores(conversations)
        return np.concatenate([self._scores([ids]) for ids in conversations])

    @torch.no_grad()
    def _scores(self, conversations: Sequence[IntArray]) -> FloatArray:
        batch = _batch([as_read(ids, self.model.config) for ids in conversations])
        result = self._passes.attempt(batch, lambda: self._all_scores(batch))
        self._passes.warn_of_retries()
        return result

    def _all_scores(self, batch: Batch) -> FloatArray:
        result = np.zeros(len(batch), np.float32)
        for micro in self._passes.over(batch):
            result[micro.members] = self._head(self._passes.hidden(micro)[micro.ends])[:, 0].float().cpu().numpy()
        return result

    def hold(self, level: Level) -> None:
        """Keeps so much on the device and lays the rest aside in host memory."""
        self._shelf.hold(level, dict(self.model.named_parameters()), {})


def _batch(conversations: Sequence[IntArray]) -> Batch:
    """The conversations, each with its last token marked."""
    offsets = np.cumsum([0, *map(len, conversations)])
    mask = np.zeros(offsets[-1], np.bool_)
    mask[offsets[1:] - 1] = True
    heat = np.ones(len(conversations), np.float32)
    return Batch(offsets, {"ids": np.concatenate(conversations).astype(np.int32), "loss_mask": mask, "temperature": heat})
