"""Resuming a run: from which checkpoint, and with which settings.

Invariants: a run that has had a checkpoint never starts over by itself; every changed setting is in the run's history,
and config.yaml has the settings that the run uses now.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from safetensors import SafetensorError, safe_open

from roll.config import Config, UserError, changed_keys, load_config
from roll.config.error_messages import format_value
from roll.config.hints import option, resume_command
from roll.config.load import redacted_config_yaml
from roll.config.secrets import redacted
from roll.run import Checkpoint, Checkpoints, Metrics, RunFolder
from roll.run.history import History

IMMUTABLE = {
    "pipeline": "the checkpoint is this pipeline's",
    "model.": "the checkpoint holds the weights of this model, in this form",
    "seed": "the order of the tasks and the noise of sampling follow from it",
    "deterministic": "the bits of the run so far depend on it",
    "tasks.": "the checkpoint says which of these tasks were drawn",
    "domains": "the checkpoint says which of their tasks were drawn",
    "data.": "the checkpoint says which of these conversations were drawn",
    "reward.": "rewards before and after could not be compared",
    "roles.reward_model.model.": "it gives rewards, and rewards before and after could not be compared",
    "roles.judge.model.": "it gives rewards, and rewards before and after could not be compared",
    "rollout.temperature": "samples that the checkpoint holds were drawn with it",
    "rollout.top_p": "samples that the checkpoint holds were drawn with it",
    "rollout.top_k": "samples that the checkpoint holds were drawn with it",
    "rollout.train_on_truncated": "samples that the checkpoint holds were drawn under it",
    "rollout.groups_per_step": "the checkpoint says where in its rounds of groups the task order is",
    "rollout.task_order": "the checkpoint holds the state of the other order",
    "rollout.lookahead": "the checkpoint holds the tasks that the order chooses from",
    "train.optimizer": "the checkpoint holds the moments of the other optimizer",
    "algorithm.name": "the checkpoint holds the state of the other algorithm",
    "algorithm.baseline": "the checkpoint holds the statistics of the other baseline",
    "algorithm.scale": "the checkpoint holds the statistics of the other scale",
    "algorithm.per_domain": "the checkpoint holds the statistics of the other scale",
    "algorithm.credit": "the checkpoint has, or lacks, the weights of a critic",
}
"""Settings that a run cannot change when it resumes, and why. A name with a trailing dot is a section."""
MUTABLE = ("data.epochs", "reward.workers", "reward.deadline_s", "reward.max_attempts")
"""Exceptions: settings in those sections that may change."""


PRECISIONS = {"F32": "fp32", "BF16": "bf16"}
"""Values of `model.dtype`, by the names of safetensors."""


@dataclass(frozen=True)
class Change:
    """A setting whose value differs from the one before the resume."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key} is {format_value(self.after)}, was {format_value(self.before)}"


@dataclass(frozen=True)
class ResumePoint:
    """What a run resumes from; without a checkpoint it starts over."""

    checkpoint: Checkpoint | None
    changes: tuple[Change, ...]
    warnings: tuple[str, ...] = ()


def find_resume_point(config: Config, folder: RunFolder) -> ResumePoint:
    """How the run in a folder resumes with a config; refused if it cannot."""
    changes = changes_of(config, folder)
    _remove_secrets(folder)
    checkpoint = newest_checkpoint(folder)
    if checkpoint is not None:
        checkpoint.verify()
    return ResumePoint(checkpoint, changes, tuple(_warnings(folder, checkpoint)))


def _remove_secrets(folder: RunFolder) -> None:
    """Removes secrets from config.yaml; older versions saved them."""
    written = folder.config_path.read_text(encoding="utf-8")
    if (cleaned := redacted_config_yaml(written)) != written:
        folder.write_config(cleaned)


def changes_of(config: Config, folder: RunFolder) -> tuple[Change, ...]:
    """The settings whose values differ from those of the run in a folder; refused if one cannot change."""
    before = load_config(folder.config_path)
    # run.dir names this folder
    before = before.model_copy(update={"run": before.run.model_copy(update={"dir": config.run.dir})})
    changes = changes_since(before, config)
    refuse_changes(folder, config, changes)
    return changes


def changes_since(before: Config, after: Config) -> tuple[Change, ...]:
    """The settings that differ."""
    return tuple(
        Change(key, redacted(_value_at(before, key), key), redacted(_value_at(after, key), key))
        for key in changed_keys(before, after)
    )


def why_immutable(key: str, config: Config) -> str | None:
    """Why a run cannot resume with another value of a setting; None if it can."""
    if key in MUTABLE:
        return None
    if key == "rollout.groups_per_step" and config.rollout.task_order in ("in_order", "longest_first"):
        return None
    if key == "algorithm.kl_coef" and config.algorithm.kl_target is not None:
        return "algorithm.kl_target steers it, and the checkpoint holds the value that was reached"
    return next((why for name, why in IMMUTABLE.items() if _matches(name, key)), None)


def _matches(name: str, key: str) -> bool:
    return key.startswith(name) if name.endswith(".") else key == name or key.startswith(f"{name}.")


def refuse_changes(folder: RunFolder, config: Config, changes: tuple[Change, ...]) -> None:
    refused = [(change, why) for change in changes if (why := why_immutable(change.key, config)) is not None]
    if refused:
        listed = "".join(f"\n  {change}: {why}" for change, why in refused)
        raise UserError(
            f"the run in {folder.path} cannot continue with other settings of "
            f"{', '.join(change.key for change, _ in refused)}: resume it without them "
            f"({resume_command(folder.config_path)}), or write run.dir=OTHER model={folder.path} for a new run from its "
            f"weights{listed}"
        )


def newest_checkpoint(folder: RunFolder) -> Checkpoint | None:
    """The newest checkpoint of a run; None if it never had one. Refused if they are missing or one is incomplete."""
    checkpoints = Checkpoints(folder)
    if incomplete := checkpoints.without_manifest():
        raise UserError(
            f"checkpoint {incomplete[-1]} is damaged (it has no manifest): `roll repair {folder.path}` moves it aside "
            "and says what the run can continue from"
        )
    checkpoint = checkpoints.latest()
    if checkpoint is None and (step := _last_saved_step(folder)) is not None:
        raise UserError(
            f"the run in {folder.path} has had checkpoints, the newest of step {step}, but {folder.checkpoints_dir} "
            f"holds none: put it back and resume, or start over with {option('restart')}, which moves this run aside"
        )
    return checkpoint


def with_saved_precision(config: Config, folder: RunFolder) -> Config:
    """The config, with the precision of the newest checkpoint where it says `auto`: what that means depends on the
    machine, and a run keeps its precision on another one."""
    checkpoint = Checkpoints(folder).latest() if config.model.dtype == "auto" else None
    saved = None if checkpoint is None else _saved_precision(checkpoint)
    if saved is None:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": saved})})


def _saved_precision(checkpoint: Checkpoint) -> str | None:
    """The precision of a checkpoint's weights or adapters; None if its model folder has none, because ranks wrote them,
    or if they cannot be read: `verify` says what is damaged."""
    for file in sorted((checkpoint.path / "model").glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy") as weights:
                kinds = {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            return None
        if len(names := kinds & PRECISIONS.keys()) == 1:
            return PRECISIONS[names.pop()]
    return None


def _last_saved_step(folder: RunFolder) -> int | None:
    """The step of a checkpoint that the run must have had."""
    saved = History(folder).newest_saved()
    if saved is not None:
        return saved
    if (summary := folder.read_summary()) is not None:  # written after the last checkpoint
        return int(summary["steps"])
    every = load_config(folder.config_path).run.checkpoint_every
    if not every or not folder.metrics_path.exists():
        return None
    last_step = max((row["step"] for row in Metrics.read(folder.metrics_path)), default=0)
    return (last_step - 1) // every * every if last_step > every else None  # saved before the next step began


def _warnings(folder: RunFolder, checkpoint: Checkpoint | None) -> list[str]:
    """Warnings for the user who resumes the run."""
    if checkpoint is None:
        return ["the run ended before its first checkpoint: it starts from the beginning"]
    saved = History(folder).newest_saved()
    if saved is not None and saved > checkpoint.step:
        return [f"the checkpoint of step {saved} is gone: the run continues from step {checkpoint.step}"]
    return []


def _value_at(config: Config, key: str) -> Any:
    value: Any = config.model_dump()
    for name in key.split("."):
        value = value[name]
    return value
