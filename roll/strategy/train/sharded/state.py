"""What a sharded trainer keeps: its shards of parameters and moments, in device or host memory and in checkpoints."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase as Tokenizer

from roll.config.errors import RunError
from roll.model.lora import Adapters
from roll.strategy.shelf import Level
from roll.strategy.train.optimizer import MasterAdamW
from roll.strategy.train.passes import Passes
from roll.strategy.train.sharded.build import ShardedModel
from roll.strategy.train.sharded.group import RankGroup
from roll.strategy.train.sharded.offload import ShardOffload
from roll.strategy.train.sharded.publish import sharded_source
from roll.transfer.stream import TensorSource


class ShardedState:
    def __init__(
        self,
        sharded: ShardedModel,
        optimizer: MasterAdamW | None,
        passes: Passes,
        group: RankGroup,
        *,
        tokenizer: Tokenizer | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self._sharded, self._optimizer, self._passes, self._group = sharded, optimizer, passes, group
        self._tokenizer, self._adapters = tokenizer, adapters
        self._offload = ShardOffload(sharded.module, group.device)

    def published(self) -> TensorSource:
        """What engines are sent: collective."""
        return sharded_source(self._sharded.module, self._group, self._sharded.dtype)

    def hold(self, level: Level) -> None:
        """Keeps so much on the device and the rest in host memory."""
        self._offload.hold(level, {} if self._optimizer is None else self._optimizer.tensors())

    def save(self, folder: Path) -> None:
        """Begins a checkpoint: what it holds is captured when this returns."""
        raise RunError("a sharded trainer is not saved yet")

    def saved(self) -> dict[str, str]:
        """Waits until this rank has written: the digests of its files, by their names in the folder."""
        return {}

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote on any number of ranks."""
        raise RunError("a sharded trainer is not loaded yet")
