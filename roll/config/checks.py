"""What holds across the sections of a configuration: no two settings contradict each other, and none goes unread."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roll.config.schema import Config

UNREAD = {
    "rlvr": ("data",),
    "sft": (
        *("tasks", "reward", "env", "rollout", "algorithm", "weights"),
        *("eval.temperature", "eval.show", "run.save_samples"),
    ),
}
"""The sections and settings that a pipeline has no use for."""


def check(config: Config) -> None:
    """`ValueError` where the sections do not go together."""
    _check_all_is_read(config)
    if config.pipeline == "sft":
        _check_sft(config)
    _check_across_fields(config)


def _check_all_is_read(config: Config) -> None:
    """What the pipeline does not read must be left alone."""
    other = "sft" if config.pipeline == "rlvr" else "rlvr"
    unread = [(name, key) for name in UNREAD[config.pipeline] if (key := _changed(config, name)) is not None]
    if unread:
        rest = f"in pipeline {config.pipeline}: remove it, or write pipeline={other}"
        raise ValueError("\n".join(f"{key} is set, but nothing reads {name} {rest}" for name, key in unread))


def _check_sft(config: Config) -> None:
    train, data = config.train, config.data
    if train.updates_per_step > 1:
        raise ValueError(
            f"train.updates_per_step is {train.updates_per_step}, but an sft step is one update: write a smaller "
            "data.samples_per_step instead"
        )
    if data.epochs and _changed(config, "train.steps") is not None:
        raise ValueError(
            f"train.steps is {train.steps} and data.epochs is {data.epochs:g}, and each is the length of the run: "
            "write one of them"
        )


def _check_across_fields(config: Config) -> None:
    rollout, train, algorithm = config.rollout, config.train, config.algorithm
    if config.executor == "local" and config.ray.address is not None:
        raise ValueError(
            f"ray.address is {config.ray.address!r}, but executor is local, which uses no Ray: write executor=ray"
        )
    if algorithm.compares_siblings and rollout.group_size < 2:
        raise ValueError(
            f"rollout.group_size is 1, but {algorithm.name} compares samples of one task: write "
            "rollout.group_size=2 or more"
        )
    if rollout.group_size == 1 and rollout.filter == "no_signal" and algorithm.baseline != "greedy":
        raise ValueError(
            "rollout.group_size is 1, and rollout.filter=no_signal drops groups whose rewards are all equal: write "
            "rollout.filter=none"
        )
    if (rollout.top_p < 1 or rollout.top_k > 0) and not rollout.train_on_truncated:
        raise ValueError(
            "rollout.top_p < 1 or rollout.top_k > 0 samples from a truncated distribution, which biases training: "
            "write rollout.top_p=1 rollout.top_k=0, or rollout.train_on_truncated=true to train on it all the same"
        )
    if rollout.max_staleness and config.executor == "local":
        raise ValueError(
            f"rollout.max_staleness is {rollout.max_staleness}, but executor is local, where generation cannot go on "
            "while training runs: write executor=ray, or rollout.max_staleness=0"
        )
    timed = (rollout.max_staleness, rollout.oversample, rollout.cut == "first", rollout.end_early)
    if config.deterministic and (any(timed) or rollout.policy != "none"):
        raise ValueError(
            "rollout.max_staleness, rollout.oversample, rollout.cut=first, rollout.end_early and rollout.policy make "
            "a batch depend on timing: write deterministic=false, or leave them out"
        )
    if rollout.max_staleness and rollout.order == "tail_rounds":
        raise ValueError("rollout.order=tail_rounds closes a round before the next begins: write rollout.max_staleness=0")
    if rollout.filter_range[0] > rollout.filter_range[1]:
        raise ValueError(f"rollout.filter_range is {rollout.filter_range}: write the lower bound first")
    if train.updates_per_step > rollout.groups_per_step:
        raise ValueError(
            f"train.updates_per_step is {train.updates_per_step}, but a step has only {rollout.groups_per_step} "
            f"groups: write train.updates_per_step={rollout.groups_per_step} or less"
        )
    if train.warmup_steps > train.steps and not config.data.epochs:
        raise ValueError(
            f"train.warmup_steps is {train.warmup_steps}, more than train.steps={train.steps}: "
            f"write train.warmup_steps={train.steps} or less"
        )


def _changed(config: Config, name: str) -> str | None:
    """The first setting of a section, or the one of that name, that is not as it is where nothing is written."""
    section, _, field = name.partition(".")
    value, usual = getattr(config, section), type(config).model_fields[section].default
    fields = [field] if field else type(value).model_fields
    return next((f"{section}.{key}" for key in fields if getattr(value, key) != getattr(usual, key)), None)
