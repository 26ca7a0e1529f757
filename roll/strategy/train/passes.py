"""A trainer's passes over a batch: how it is cut into micro-batches, and how the decoder runs over one."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from roll.config.errors import UserError
from roll.config.schema import TrainConfig
from roll.data.batch import Batch
from roll.data.tokenlog import branches
from roll.model.lora import adapted_layers
from roll.model.positions import longest_sequence
from roll.model.shape import ModelShape
from roll.strategy.train.budget import Budget, choose, spare_of
from roll.strategy.train.footprint import Footprint
from roll.strategy.train.layers import Layers, compiles
from roll.strategy.train.microbatch import MicroBatch, micro_batches
from roll.strategy.train.suspects import sample_name

_log = logging.getLogger(__name__)


class Passes:
    def __init__(self, model: PreTrainedModel, config: TrainConfig) -> None:
        self._model, self._config = model, config
        adapted = bool(adapted_layers(model))
        self._compiled = compiles(config.compile, model.device.type, model.dtype, adapted=adapted)
        self._layers = Layers(model, compiled=self._compiled)
        self._budget: Budget | None = None

    def over(self, batch: Batch) -> Iterator[MicroBatch]:
        budget = self.budget(batch)
        self._check_lengths(batch)
        return micro_batches(batch, budget.rows, self._model, self._config.share_prefixes)

    def hidden(self, micro: MicroBatch) -> Tensor:
        """The last hidden state of every row."""
        checkpointed = self._budget is not None and self._budget.checkpointed
        with self._layers.running(checkpointed=checkpointed):
            return micro.hidden(self._model)

    def _check_lengths(self, batch: Batch) -> None:
        """Raises if a sample to be trained on is longer than the model or the user allows."""
        if not len(batch):
            return
        lengths = np.where(batch.sum_tokens(batch.loss_mask) > 0, batch.lengths, 0)
        tokens, name = int(lengths.max()), sample_name(batch, int(lengths.argmax()))
        context, asked = longest_sequence(self._model.config), self._config.micro_batch_tokens
        if tokens > context and (longest := _longest_branch(batch, context)) is not None:
            name, tokens = sample_name(batch, longest[0]), longest[1]
            raise UserError(
                f"sample {name} has {tokens} tokens, but the model's context is {context}: write a smaller "
                f"rollout.max_new_tokens, or in pipeline sft data.max_tokens={context} and data.too_long=drop or cut"
            )
        if 0 < asked < tokens:
            raise UserError(
                f"sample {name} has {tokens} tokens, but train.micro_batch_tokens is {asked}: write "
                f"train.micro_batch_tokens={tokens} or more, or a smaller rollout.max_new_tokens"
            )

    def budget(self, batch: Batch) -> Budget:
        """Chosen at the first batch and kept, so that equal batches are cut alike."""
        if self._budget is None:
            longest = int(batch.lengths.max(initial=0))
            model, asked = self._model, self._config
            footprint = Footprint(ModelShape.of_model(model), model.dtype, model.device.type, self._compiled)
            rows, checkpointing = asked.micro_batch_tokens, asked.activation_checkpointing
            spare = spare_of(model, footprint, asked.optimizer)
            self._budget = choose(footprint, rows, checkpointing, longest, spare)
            if spare is not None and not rows and self._budget.rows < longest:
                _log.warning(
                    "the GPU has memory for %d tokens in a micro-batch beside what is on it: samples are trained on one "
                    "by one, which is slow; end other programs on it, or write a smaller rollout.kv_tokens",
                    self._budget.rows,
                )
        return self._budget


def _longest_branch(batch: Batch, limit: int) -> tuple[int, int] | None:
    """The sample whose sequence of tokens is longer than the limit, and how long that is, if there is one."""
    turns = batch.rows("turn") if "turn" in batch else [np.zeros(length, np.int32) for length in batch.lengths]
    longest = [max(span.stop - span.start for span in branches(turn)) if len(turn) else 0 for turn in turns]
    index = int(np.argmax(longest))
    return (index, longest[index]) if longest[index] > limit else None
