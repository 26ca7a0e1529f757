"""Estimates how much a run will write to disk, before anything starts: its checkpoints, and the files of every step.

The size of checkpoints is computed: weights, master weights and moments have known sizes. The size of a step's files is
extrapolated from small runs, for samples of the longest size and all allowed replacements; usually it is less.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import torch

from roll.config.errors import UserError
from roll.config.schema import Config
from roll.devices.map import DeviceMap
from roll.devices.memory import ModelSize
from roll.devices.memory_inputs import MemoryInputs
from roll.strategy.train.microbatch_budget import MOMENT_BYTES

LEDGER_BYTES = 600
"""Ledger bytes per sampled sample."""
CHAT_LEDGER_BYTES = 220
"""Ledger bytes per conversation of sft, which is only queued and trained."""
TRACE_BYTES = 1200
"""Trace bytes per sample."""
SAMPLE_BYTES = 400
"""Bytes of a stored sample without its tokens."""
TOKEN_BYTES = 27
"""Bytes per stored token: its id, log-prob, version and mask, and its text."""
STEP_BYTES = 3000
"""Bytes of a step's metrics, as JSON and as TensorBoard events each."""
FILE_BYTES = 1 << 16
"""Bytes of a checkpoint's small files: tokenizer, state, manifest."""


@dataclass(frozen=True)
class DiskEstimate:
    checkpoint_bytes: int
    checkpoints: int
    """Number of checkpoints kept at the end."""
    lasting: tuple[tuple[str, int], ...]
    """Everything else that is there at the end, by name."""

    @property
    def peak_bytes(self) -> int:
        """The most that is on disk at once: a new checkpoint is written before an old one is deleted."""
        return (self.checkpoints + 1) * self.checkpoint_bytes + sum(size for _, size in self.lasting)


def planned_writes(config: Config, map: DeviceMap, model: ModelSize, inputs: MemoryInputs) -> DiskEstimate:
    run, steps = config.run, config.train.steps
    every = run.checkpoint_every or steps
    saved = ceil(steps / every)
    kept_forever = steps // run.keep.checkpoints_every if run.keep.checkpoints_every else 0
    kept = min(saved, run.keep.checkpoints + kept_forever + run.keep.best)
    samples = inputs.groups * config.train.updates_per_step * inputs.group_size
    lasting: dict[str, int] = {}
    if "actor_infer" not in map.roles:  # no samples are generated
        lasting["ledger"] = samples * steps * CHAT_LEDGER_BYTES
    else:
        issued = ceil(samples * (1 + config.rollout.max_replacements))
        lasting["ledger"] = issued * steps * LEDGER_BYTES
        if run.save_samples:
            steps_kept = min(steps, run.keep.samples) if run.keep.samples else steps
            lasting["samples"] = issued * steps_kept * (SAMPLE_BYTES + TOKEN_BYTES * inputs.longest)
        if run.trace:
            traced = issued * steps * TRACE_BYTES
            lasting["trace"] = min(traced, run.keep.trace_mb << 20) if run.keep.trace_mb else traced
    lasting["metrics"] = steps * STEP_BYTES * (2 if run.tensorboard else 1)
    trainers = [role for role in ("actor_train", "critic") if role in map.roles]
    checkpoint = sum(_trainer_bytes(role, model, inputs) for role in trainers) + FILE_BYTES
    return DiskEstimate(checkpoint, kept, tuple(lasting.items()))


def _trainer_bytes(role: str, model: ModelSize, inputs: MemoryInputs) -> int:
    """Bytes that a trainer saves: its weights (or only the adapters) and the optimizer's state. A sharded trainer saves
    master weights, which are its weights."""
    sizes, dtype = model.sizes_of(role), model.dtypes[role]
    masters = 0 if dtype == torch.float32 and role not in model.shards else 4 * sizes.trained
    weights = 0 if role in model.shards else sizes.trained * dtype.itemsize
    return weights + masters + sizes.trained * MOMENT_BYTES[inputs.optimizer]


def free_bytes(folder: Path) -> int:
    """Free bytes on the file system of a folder, which need not exist yet."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def disk_warning(writes: DiskEstimate, folder: Path) -> str | None:
    """A warning if the run's files may not all fit; None if they do."""
    free = free_bytes(folder)
    if writes.peak_bytes <= free:
        return None
    return (
        f"the run will write up to about {_gib(writes.peak_bytes)}, but {_gib(free)} are free for {folder}: make room, "
        "write run.dir=OTHER, or keep less (run.keep, run.save_samples=false, run.trace=false)"
    )


def check_disk(writes: DiskEstimate, folder: Path) -> None:
    """Raises if not even one checkpoint fits."""
    free = free_bytes(folder)
    if writes.checkpoint_bytes > free:
        raise UserError(
            f"a checkpoint has {_gib(writes.checkpoint_bytes)}, but {_gib(free)} are free for {folder}: make room, "
            "or write run.dir=OTHER"
        )


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
