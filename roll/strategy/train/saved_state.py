"""What a trainer resumes from, whichever strategy wrote it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from roll.config.errors import RunError
from roll.model.find import SHARDS
from roll.model.shard_folder import ShardFolder
from roll.model.shard_loading import SafeFolder, Tensors
from roll.strategy.train.optimizer import MasterAdamW

OPTIMIZER_FILE = "optimizer.safetensors"


def open_state(folder: Path) -> Tensors:
    """Masters and moments in a checkpoint's folder: in one file of `single`, or in the shards of `sharded`."""
    if (folder / OPTIMIZER_FILE).is_file():
        return SafeFolder(folder, OPTIMIZER_FILE)
    if (folder / SHARDS).is_dir():
        return ShardFolder(folder / SHARDS)
    raise RunError(f"the checkpoint in {folder} has neither {OPTIMIZER_FILE} nor {SHARDS}/: it holds no trainer's state")


def load_state(folder: Path, optimizer: MasterAdamW, load_model: Callable[[bool], None]) -> None:
    """Brings the optimizer, and through its masters the parameters, to a checkpoint. `load_model` reads the model's
    tensors that are not parameters, and the parameters too (True) where they are their own masters, saved with the model
    alone."""
    saved = open_state(folder)
    load_model(not optimizer.has_masters(saved))
    optimizer.load(saved)
