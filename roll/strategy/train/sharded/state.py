"""The state of a sharded trainer: its shards of parameters and moments, in device memory, host memory and checkpoints."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase as Tokenizer

from roll.model.shard_loading import load_shards
from roll.strategy.offload import Residency
from roll.strategy.train.forward import ForwardRunner
from roll.strategy.train.optimizer import MasterAdamW
from roll.strategy.train.saved_state import load_state
from roll.strategy.train.sharded.build import ShardedModel
from roll.strategy.train.sharded.checkpoint import ShardWriter, save_adapters, save_settings, state_of
from roll.strategy.train.sharded.offload import ShardOffload, reshard
from roll.strategy.train.sharded.process_group import RankGroup
from roll.strategy.train.sharded.publish import sharded_source
from roll.weight_sync.stream import TensorSource


class ShardedState:
    def __init__(
        self,
        sharded: ShardedModel,
        optimizer: MasterAdamW | None,
        runner: ForwardRunner,
        group: RankGroup,
        *,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._sharded, self._optimizer, self._runner, self._group = sharded, optimizer, runner, group
        self._tokenizer, self._adapters = tokenizer, sharded.adapters
        self._offload = ShardOffload(sharded.module, group.device)
        self._writer: ShardWriter | None = None

    def published(self) -> TensorSource:
        """The tensors to send to engines. A collective call."""
        return sharded_source(self._sharded.module, self._group, self._sharded.dtype)

    def set_residency(self, level: Residency) -> None:
        """Keeps the tensors named by `level` on the device and offloads the rest to host memory."""
        self._offload.set_residency(level, {} if self._optimizer is None else self._optimizer.tensors())

    def save(self, folder: Path) -> None:
        """Starts a checkpoint: its values are copied when this returns."""
        assert self._optimizer is not None, "a frozen model has nothing to save"
        writer, model = self._shard_writer(), self._sharded.value or self._sharded.model
        writer.save(state_of(model, self._optimizer, adapters=self._adapters is not None), folder)
        if self._adapters is not None:
            save_adapters(self._adapters, self._sharded.dtype, folder / "model", self._group)
        elif self._group.is_first:
            save_settings(self._sharded.model, self._sharded.dtype, folder / "model")
        if self._group.is_first:
            if self._tokenizer is not None:
                self._tokenizer.save_pretrained(folder / "model")
            self._runner.save(folder)

    def saved(self) -> dict[str, str]:
        """Waits until this rank has written. Returns the digests of its files by their names in the folder."""
        return {} if self._writer is None else self._writer.saved()

    def load(self, folder: Path) -> None:
        """Reads a checkpoint that `save` wrote on any number of ranks, or that a single process wrote."""
        assert self._optimizer is not None, "a frozen model is not resumed"
        if self._adapters is not None:
            self._adapters.check_base(folder / "model")
        reshard(self._sharded.module)  # parameters that a forward pass left gathered would keep the old values
        load_state(folder, self._optimizer, lambda parameters: self._load_model(folder, parameters))
        self._runner.load(folder)

    def _load_model(self, folder: Path, parameters: bool) -> None:
        if self._sharded.value is None and self._adapters is None:
            load_shards(self._sharded.model, folder / "model", parameters=parameters)
        elif parameters and self._sharded.value is not None:
            self._sharded.value.load(folder)
        elif parameters and self._adapters is not None:
            self._adapters.load(folder / "model")

    def _shard_writer(self) -> ShardWriter:
        """Created at the first checkpoint, by all ranks together."""
        if self._writer is None:
            self._writer = ShardWriter(self._group)
        return self._writer
