"""What the plan of a run needs to know about its pipeline: the roles it starts, and the sizes of their work."""

from __future__ import annotations

from dataclasses import dataclass

from roll.config.evaluation import domain_of
from roll.config.schema import Config
from roll.data.domains import first_of_each
from roll.data.sources import TaskSet
from roll.devices.memory_inputs import MemoryInputs
from roll.model.chat import ChatRenderer
from roll.model.find import find_model
from roll.model.loading import load_tokenizer
from roll.model.sft_dataset import EpochPermutation, SFTDataset


@dataclass(frozen=True)
class RunRequirements:
    roles: frozenset[str]
    memory_inputs: MemoryInputs
    sizes: tuple[tuple[str, str], ...]
    """Names and values to show before the run starts."""


def rlvr_requirements(config: Config, tasks: TaskSet) -> RunRequirements:
    renderer = ChatRenderer(load_tokenizer(find_model(config.model.path), config.model), ())
    messages_of_tasks = [task.messages for task in first_of_each(tasks.train, 256) if task.messages]
    prompts = [len(renderer.opening(messages).tokens) for messages in messages_of_tasks] or [0]
    rollout, train = config.rollout, config.train
    samples = rollout.groups_per_step * rollout.group_size
    sizes = (
        ("tasks", f"{len(tasks.train)} to train on, {len(tasks.held_out)} held out"),
        *([("left out", f"{len(tasks.left_out)} tasks, their prompts are too long")] if tasks.left_out else []),
        *((f"domain {name}", _share(name, config, tasks)) for name in config.domains),
        *((f"eval set {name}", _set(name, config, tasks)) for name in config.eval.sets),
        ("samples per step", f"{rollout.groups_per_step} groups × {rollout.group_size} = {samples}"),
        ("tokens per sample", f"prompt up to {max(prompts)}, response up to {config.longest_response}"),
        ("updates per step", str(train.updates_per_step * train.epochs_per_step)),
        ("steps", f"{train.steps}, {train.steps * samples} samples in all"),
    )
    memory_inputs = MemoryInputs.of(config, min(prompts), max(prompts))
    return RunRequirements(rlvr_roles(config, tasks.has_environments), memory_inputs, sizes)


def _share(domain: str, config: Config, tasks: TaskSet) -> str:
    train, held_out = (sum(task.domain == domain for task in part) for part in (tasks.train, tasks.held_out))
    share = config.domain_mix.get(domain, 0) / sum(config.domain_mix.values())
    return f"{share:.3g} of the groups, {train} tasks, {held_out} held out"


def _set(name: str, config: Config, tasks: TaskSet) -> str:
    count, settings = sum(task.domain == domain_of(name) for task in tasks.held_out), config.eval.settings(name)
    if settings.attempts or not settings.samples:
        attempts = settings.attempts or 1
        tasks_asked = min(count, settings.samples // attempts) if settings.samples else count
        return f"{count} tasks, {tasks_asked} asked × {attempts} = {tasks_asked * attempts} answers"
    return f"{count} tasks, {settings.samples} answers"


def rlvr_roles(config: Config, environments: bool = False) -> frozenset[str]:
    """The roles that an RLVR run starts; `environments`: its tasks have environments."""
    roles = {"actor_train", "actor_infer", "rollout", "reward"}
    # without its adapters, the actor is the reference
    if config.algorithm.needs_reference and config.model.adapters is None:
        roles.add("reference")
    if config.algorithm.needs_critic:
        roles.add("critic")
    if environments:
        roles.add("env")
    roles.update(config.scoring_roles)
    return frozenset(roles)


SFT_ROLES = frozenset({"actor_train"})


def sft_requirements(config: Config, corpus: SFTDataset, permutation: EpochPermutation) -> RunRequirements:
    train, held_out = corpus.train, corpus.held_out
    learned = int(train.loss_mask.sum())
    sizes = (
        ("samples", f"{len(train)} to train on, {0 if held_out is None else len(held_out)} held out"),
        ("left out", f"{len(corpus.skipped)} too long"),
        ("tokens per sample", f"{train.tokens / len(train):.0f} in the mean, up to {corpus.longest_tokens}"),
        ("tokens trained on", f"{learned} of {train.tokens}"),
        ("samples per step", str(permutation.samples_per_step)),
        ("steps", f"{permutation.steps}, {permutation.epochs:.3g} epochs, {permutation.total} samples in all"),
    )
    return RunRequirements(SFT_ROLES, MemoryInputs.of_chats(config, corpus.longest_tokens), sizes)
