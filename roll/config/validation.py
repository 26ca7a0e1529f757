"""What holds across the sections of a configuration: no two settings contradict each other, and none goes unread."""

from __future__ import annotations

import re

from roll.config.evaluation import check_evaluation
from roll.config.rollout import RolloutConfig
from roll.config.settings import Settings

UNUSED_BY_PIPELINE = {
    "rlvr": ("data",),
    "sft": (
        *("tasks", "domains", "reward", "env", "rollout", "algorithm", "weight_sync"),
        *("eval.temperature", "eval.show", "eval.attempts", "eval.pass_at", "eval.majority_at", "eval.solved_at"),
        *("eval.sets", "run.save_samples"),
    ),
}
"""The sections and settings that a pipeline has no use for."""
REPLACED_BY_DOMAINS = (
    "tasks.source",
    "tasks.options",
    "tasks.domain_weights",
    "reward.name",
    "reward.options",
    "reward.parts",
)
"""The settings that a run with domains has no use for."""
_NAME = re.compile(r"[\w-]+")


def check(config: Settings) -> None:
    """`ValueError` where the sections do not go together."""
    _check_unused(config)
    if config.domains:
        _check_domains(config)
    if config.pipeline == "sft":
        _check_sft(config)
    else:
        _check_scoring(config)
        _check_sets(config)
    _check_across_fields(config)


def has_rewards(config: Settings) -> bool:
    """Whether the pipeline reads the section `reward`."""
    return "reward" not in UNUSED_BY_PIPELINE.get(config.pipeline, ())


def _check_unused(config: Settings) -> None:
    """What the pipeline does not read must be left alone. A pipeline of the user's may read anything."""
    others = UNUSED_BY_PIPELINE.get(config.pipeline, ())
    unused = [(name, key) for name in others if (key := _changed(config, name)) is not None]
    if unused:
        other = "sft" if config.pipeline == "rlvr" else "rlvr"
        rest = f"in pipeline {config.pipeline}: remove it, or write pipeline={other}"
        raise ValueError("\n".join(f"{key} is set, but nothing reads {name} {rest}" for name, key in unused))


def _check_sft(config: Settings) -> None:
    train, data = config.train, config.data
    if train.updates_per_step > 1:
        raise ValueError(
            f"train.updates_per_step is {train.updates_per_step}, but an sft step is one update: write a smaller "
            "data.samples_per_step instead"
        )
    if train.epochs_per_step > 1:
        raise ValueError(
            f"train.epochs_per_step is {train.epochs_per_step}, but an sft step is one update: write data.epochs instead"
        )
    if data.epochs and _changed(config, "train.steps") is not None:
        raise ValueError(
            f"train.steps is {train.steps} and data.epochs is {data.epochs:g}, and each is the length of the run: "
            "write one of them"
        )


def _check_scoring(config: Settings) -> None:
    """A role that gives rewards has a model, and a model is asked for rewards."""
    scoring_roles = config.scoring_roles
    for role in ("reward_model", "judge"):
        has_model = bool(getattr(config.roles, role).model.path)
        if role in scoring_roles and not has_model:
            server = f", or {scoring_roles[role]}.options.url for a server" if role == "judge" else ""
            raise ValueError(
                f"{scoring_roles[role]}.name is {role}, but roles.{role} has no model: write "
                f"roles.{role}.model=PATH{server}"
            )
        if has_model and role not in scoring_roles:
            where = f"domains.{next(iter(config.domains))}.reward" if config.domains else "reward"
            raise ValueError(
                f"roles.{role}.model.path is set, but no reward asks it: write {where}.name={role}, or a part of it in "
                f"{where}.parts, or remove roles.{role}"
            )


def _check_domains(config: Settings) -> None:
    """Each domain has all that a run without domains has once."""
    for name in REPLACED_BY_DOMAINS:
        if (key := _changed(config, name)) is not None:
            what = key.partition(".")[0]
            raise ValueError(f"{key} is set, and so are domains, each with its own {what}: remove {key}, or domains")
    for name, domain in config.domains.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"domains has {name!r}: a name is of letters, digits, - and _")
        domain_rollout = domain.rollout(config.rollout)
        _check_groups(config, domain_rollout, f"domains.{name}.filter" if domain.filter is not None else "rollout.filter")
        if domain.filter_range is not None and domain_rollout.filter != "mean_range":
            raise ValueError(
                f"domains.{name}.filter_range is set, but nothing reads it: write domains.{name}.filter=mean_range"
            )
        _check_range(f"domains.{name}.filter_range", domain_rollout.filter_range)
    if not any(domain.weight for domain in config.domains.values()):
        raise ValueError(
            f"domains.{next(iter(config.domains))}.weight is 0, and so are all others: nothing is trained on"
        )
    if not any(domain.tasks.source for domain in config.domains.values()):
        raise ValueError(f"domains.{next(iter(config.domains))}.tasks has no source, and no other domain has one")


def _check_sets(config: Settings) -> None:
    for name in config.eval.sets:
        if not _NAME.fullmatch(name):
            raise ValueError(f"eval.sets has {name!r}: a name is of letters, digits, - and _")
    check_evaluation(config.eval, bool(config.domains))


def _check_groups(config: Settings, rollout: RolloutConfig, setting: str) -> None:
    if rollout.group_size == 1 and rollout.filter == "no_signal" and config.algorithm.baseline != "greedy":
        raise ValueError(
            f"rollout.group_size is 1, and {setting}=no_signal drops groups whose rewards are all equal: write "
            f"{setting}=none"
        )


def _check_range(setting: str, bounds: tuple[float, float]) -> None:
    if bounds[0] > bounds[1]:
        raise ValueError(f"{setting} is {bounds}: write the lower bound first")


def _check_across_fields(config: Settings) -> None:
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
    if not config.domains:
        _check_groups(config, rollout, "rollout.filter")
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
    timed = (rollout.max_staleness, rollout.oversample, rollout.batch_selection == "first_finished", rollout.early_stop)
    if config.deterministic and (any(timed) or rollout.policy != "none"):
        raise ValueError(
            "rollout.max_staleness, rollout.oversample, rollout.batch_selection=first_finished, rollout.early_stop and "
            "rollout.policy make "
            "a batch depend on timing: write deterministic=false, or leave them out"
        )
    if rollout.max_staleness and rollout.task_order == "tail_batching":
        raise ValueError(
            "rollout.task_order=tail_batching closes a round before the next begins: write rollout.max_staleness=0"
        )
    _check_range("rollout.filter_range", rollout.filter_range)
    if train.updates_per_step > rollout.groups_per_step:
        raise ValueError(
            f"train.updates_per_step is {train.updates_per_step}, but a step has only {rollout.groups_per_step} "
            f"groups: write train.updates_per_step={rollout.groups_per_step} or less"
        )
    warmup_steps = config.algorithm.critic_warmup_steps
    if warmup_steps >= train.steps:
        raise ValueError(
            f"algorithm.critic_warmup_steps is {warmup_steps}, which leaves nothing of train.steps={train.steps} for the "
            f"model itself: write algorithm.critic_warmup_steps={train.steps - 1} or less"
        )
    if train.warmup_steps > train.steps and not config.data.epochs:
        raise ValueError(
            f"train.warmup_steps is {train.warmup_steps}, more than train.steps={train.steps}: "
            f"write train.warmup_steps={train.steps} or less"
        )


def _changed(config: Settings, name: str) -> str | None:
    """The first setting of a section, or the one of that name, that is not as it is where nothing is written."""
    section, _, field = name.partition(".")
    value, default = getattr(config, section), type(config).model_fields[section].get_default(call_default_factory=True)
    if isinstance(value, dict):
        return section if value != default else None
    fields = [field] if field else type(value).model_fields
    return next((f"{section}.{key}" for key in fields if getattr(value, key) != getattr(default, key)), None)
