"""Reads a trainer's checkpoint, whichever strategy wrote it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from roll.config.errors import RunError
from roll.model.find import SHARDS
from roll.model.shard_loading import SafeFolder, Tensors
from roll.strategy.train.optimizer import MasterAdamW

OPTIMIZER_FILE = "optimizer.safetensors"


def open_state(folder: Path) -> Tensors:
    """Master weights and moments in a checkpoint folder: one file written by `single`, or the shards written by
    `sharded`."""
    if (folder / OPTIMIZER_FILE).is_file():
        return SafeFolder(folder, OPTIMIZER_FILE)
    if (folder / SHARDS).is_dir():
        from roll.model.shard_folder import ShardFolder  # imports torch.distributed.checkpoint, which takes long

        return ShardFolder(folder / SHARDS)
    raise RunError(f"the checkpoint in {folder} has neither {OPTIMIZER_FILE} nor {SHARDS}/: it holds no trainer's state")


def load_state(folder: Path, optimizer: MasterAdamW, load_model: Callable[[bool], None]) -> None:
    """Loads a checkpoint into the optimizer, and from its master weights into the parameters. `load_model(False)` reads
    only the model's tensors that are not parameters. `load_model(True)` also reads the parameters; it is called if the
    checkpoint has no separate master weights, because the parameters are their own masters."""
    saved = open_state(folder)
    load_model(not optimizer.has_masters(saved))
    optimizer.load(saved)
