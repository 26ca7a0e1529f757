"""Exports a run's newest weights to a folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from roll.config.errors import RunError, UserError
from roll.config.file_modes import inherit_folder_mode_recursively
from roll.config.hints import option
from roll.model.find import holds_adapters, shards_of
from roll.run.checkpoint import Checkpoints
from roll.run.disk import full_disk, human_bytes
from roll.run.folder import RunFolder


def export_model(run: Path, target: Path, *, adapter: bool = False) -> int:
    """Writes the newest checkpoint's model, verified, to a folder that does not exist yet; returns the checkpoint's step.

    Adapters are merged into their base model, or copied unmerged with `adapter`. The shards of a sharded trainer are
    joined tensor by tensor.
    """
    checkpoint = Checkpoints(RunFolder.open(run)).latest()
    if checkpoint is None:
        raise UserError(f"the run in {run} has no checkpoint yet: there is nothing to export")
    if target.exists():
        raise UserError(f"{target} exists already: write another folder")
    model = checkpoint.path / "model"
    if adapter and not holds_adapters(model):
        raise UserError(
            f"the run in {run} trained all weights and has no adapters: export it without {option('adapter')}"
        )
    checkpoint.verify()
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    try:
        temporary.mkdir()
    except OSError as error:
        raise UserError(f"cannot write {temporary} ({error.strerror}): write another folder") from error
    try:
        if holds_adapters(model) and not adapter:
            from roll.model.loading import write_merged  # takes seconds

            write_merged(model, temporary)
        elif not adapter and (shards := shards_of(model)) is not None:
            from roll.model.shard_export import export_shards  # takes seconds

            export_shards(model, shards, temporary)
        else:
            shutil.copytree(model, temporary, dirs_exist_ok=True)
        temporary.chmod(RunFolder.open(run).path.stat().st_mode & 0o777)
        for inside in temporary.iterdir():
            inherit_folder_mode_recursively(inside)
        temporary.rename(target)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if (cause := full_disk(error)) is not None:
            free = human_bytes(shutil.disk_usage(target.parent).free)
            raise RunError(f"cannot write {target}: {cause} ({free} free): make room, or write another folder") from error
        raise
    return checkpoint.step
