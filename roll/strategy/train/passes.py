"""A trainer's passes over a batch: how it is cut into micro-batches, and how the decoder runs over one."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from transformers import PreTrainedModel

from roll.config.schema import TrainConfig
from roll.data.batch import Batch
from roll.model.shape import ModelShape
from roll.strategy.train.budget import Budget, choose, spare_of
from roll.strategy.train.footprint import Footprint
from roll.strategy.train.layers import Layers
from roll.strategy.train.microbatch import MicroBatch, micro_batches


class Passes:
    def __init__(self, model: PreTrainedModel, config: TrainConfig) -> None:
        self._model, self._config = model, config
        compiled = {"on": True, "off": False, "auto": model.device.type == "cuda"}[config.compile]
        self._layers = Layers(model, compiled=compiled)
        self._budget: Budget | None = None

    def over(self, batch: Batch) -> Iterator[MicroBatch]:
        budget = self.budget(batch)
        return micro_batches(batch, budget.rows, self._model, self._config.share_prefixes)

    def hidden(self, micro: MicroBatch) -> Tensor:
        """The last hidden state of every row."""
        checkpointed = self._budget is not None and self._budget.checkpointed
        with self._layers.running(checkpointed=checkpointed):
            return micro.hidden(self._model)

    def budget(self, batch: Batch) -> Budget:
        """Chosen at the first batch and kept, so that equal batches are cut alike."""
        if self._budget is None:
            longest = int(batch.lengths.max(initial=0))
            model, asked = self._model, self._config
            footprint = Footprint(ModelShape.of_model(model), model.dtype, model.device.type)
            rows, checkpointing = asked.micro_batch_tokens, asked.activation_checkpointing
            self._budget = choose(footprint, rows, checkpointing, longest, spare_of(model, footprint))
        return self._budget
