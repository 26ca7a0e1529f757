"""Exporting: a run's newest weights as a folder of their own."""

from __future__ import annotations

import shutil
from pathlib import Path

from roll.config.errors import UserError
from roll.run.checkpoint import Checkpoints
from roll.run.folder import RunFolder


def export_model(run: Path, target: Path) -> int:
    """Copies the newest checkpoint's model, verified, to a folder that does not exist yet; returns the step it is of."""
    checkpoint = Checkpoints(RunFolder.open(run)).latest()
    if checkpoint is None:
        raise UserError(f"the run in {run} has no checkpoint yet: there is nothing to export")
    if target.exists():
        raise UserError(f"{target} exists already: write another folder")
    checkpoint.verify()
    aside = target.with_name(f".{target.name}.aside")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(checkpoint.path / "model", aside)
    aside.rename(target)
    return checkpoint.step
