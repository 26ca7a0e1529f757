"""Checks that need no model: run folder, tasks, rewards and environments that are missing or do not fit together.

Imports neither torch nor transformers, which take seconds. The results are passed on, so that nothing is read twice.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from roll.config.errors import UserError
from roll.config.evaluation import domain_of, set_of
from roll.config.hints import option
from roll.config.reward import RewardRule
from roll.config.root import is_object, with_absolute_paths
from roll.config.schema import Config
from roll.config.suggest import did_you_mean
from roll.data.chat_sources import ChatSource
from roll.data.domains import load_domains
from roll.data.eval_sets import with_eval_sets
from roll.data.formats import FORMATS
from roll.data.sources import TaskSet, TaskSource, load_tasks
from roll.data.task import Task
from roll.env.preflight import check_seed, checks_values, episodes
from roll.env.resolve import portable_spec as find_code
from roll.model.find import check_template, find_model
from roll.pipeline.policies import check_policies
from roll.pipeline.registry import pipeline_of
from roll.reward import RewardFn, RewardSpec
from roll.reward.builtin import BUILTINS, EXTERNAL_REWARDS, SHAPE_REWARDS
from roll.run.code import load_object
from roll.run.folder import RunFolder
from roll.run.trackers import find_trackers
from roll.strategy.registry import check_names


def check_folder(config: Config, *, resume: bool, restart: bool) -> None:
    """Refuses a folder in which the run cannot be created, or resumed."""
    run_dir = Path(config.run.dir)
    if not resume:
        RunFolder.check_new(run_dir, restart)
    elif not run_dir.exists():
        raise UserError(f"there is no run in {run_dir} to continue: leave out {option('resume')} to start one")
    else:
        RunFolder.open(run_dir)


def check_model(config: Config) -> None:
    """Refuses a model or a chat template that does not exist."""
    config = with_absolute_paths(config)
    check_template(config.model)
    find_model(config.model.path)


def check_has_rollouts(config: Config) -> None:
    """Refuses a pipeline that has no rollouts."""
    if not pipeline_of(config).has_rollouts:
        raise UserError(f"pipeline {config.pipeline} makes no rollouts: write pipeline=rlvr")


def find(
    config: Config,
    *,
    reward: RewardFn | None = None,
    tasks: TaskSource | None = None,
    chats: ChatSource | None = None,
) -> Any:
    """The data that the config names, or the objects given instead, as its pipeline reads it: checked as far as possible
    without the model."""
    config = with_absolute_paths(config)
    find_trackers(config.run, config.root)
    check_names(config)
    pipeline, given = pipeline_of(config), {"reward": reward, "tasks": tasks, "chats": chats}
    objects = {name: value for name, value in given.items() if value is not None}
    for name in objects.keys() - pipeline.objects:
        raise UserError(f"{name} were given, but nothing reads them in pipeline {config.pipeline}: leave them out")
    return pipeline.find(config, objects)


def find_tasks(config: Config, reward: RewardFn | None, tasks: TaskSource | None) -> tuple[TaskSet, RewardSpec]:
    """The tasks and the reward of a run with rollouts."""
    reward = object_given_in_python(config.reward.name) if reward is None else reward
    tasks = object_given_in_python(config.tasks.source) if tasks is None else tasks
    task_set, reward_spec = _tasks_and_reward(config, reward, tasks)
    task_set = _located(with_eval_sets(task_set, config.eval.sets, config.root), config.root)
    reward_spec = reward_spec.with_sets(_set_rewards(config))
    reward_spec.check()
    _check_limits(config, task_set)
    _check_rewards(config, task_set, reward is not None)
    if reward is None and tasks is None:
        _check_formats(config)
    _check_votes(config, task_set, reward_spec)
    _check_turns(config, task_set)
    check_policies(config, task_set)
    return task_set, reward_spec


def object_given_in_python(name: str) -> Any:
    """The object that a name in a run's config refers to, if it was given in Python; None otherwise."""
    return load_object(name) if is_object(name) else None


def _tasks_and_reward(config: Config, reward: RewardFn | None, tasks: TaskSource | None) -> tuple[TaskSet, RewardSpec]:
    if not config.domains:
        reward_spec = (
            RewardSpec.of(reward, config.root) if reward is not None else RewardSpec.of_config(config.reward, config.root)
        )
        return load_tasks(config.tasks, tasks, config.root), reward_spec
    for name, given in (("reward", reward), ("tasks", tasks)):
        if given is not None:
            raise UserError(f"{name} was given, but each of the config's domains has its own: leave it out, or domains")
    reward_spec = RewardSpec.of_domains({name: domain.reward for name, domain in config.domains.items()}, config.root)
    return load_domains(config.domains, config.root), reward_spec


def _located(tasks: TaskSet, root: str) -> TaskSet:
    """The tasks with environments that every process can import; refuses missing environments and unknown options."""
    checked: dict[tuple[str, str], tuple[str | bytes, int | None]] = {}

    def with_code(task: Task) -> Task:
        spec = task.environment
        if spec is None:
            return task
        spec = replace(spec, root=root)
        kind = (spec.name, repr(sorted(spec.options.items()) if checks_values(spec.name) else sorted(spec.options)))
        if kind not in checked:
            episode_count = episodes(spec)
            checked[kind] = find_code(spec).code, episode_count
        code, episode_count = checked[kind]
        check_seed(spec, episode_count)
        return replace(task, environment=replace(spec, code=code) if code else spec)

    return replace(
        tasks,
        train=tuple(map(with_code, tasks.train)),
        held_out=tuple(map(with_code, tasks.held_out)),
    )


def _set_rewards(config: Config) -> dict[str, RewardRule]:
    """The rewards of evaluation sets that have their own, by the domain of their tasks."""
    return {domain_of(name): each.reward for name, each in config.eval.sets.items() if each.reward is not None}


def rules_of(config: Config) -> dict[str, RewardRule]:
    """The rewards of the config, by the setting that names them."""
    if not config.domains:
        return {"reward": config.reward}
    return {f"domains.{name}.reward": domain.reward for name, domain in config.domains.items()}


def _check_rewards(config: Config, tasks: TaskSet, given: bool) -> None:
    """Refuses a reward that would judge nothing, because the environments of all tasks give the rewards."""
    set_rewards = _set_rewards(config)
    for domain, rule in set_rewards.items():
        if all(task.environment is not None for task in tasks.held_out if task.domain == domain):
            raise UserError(
                f"eval.sets.{set_of(domain)}.reward is {rule.label!r}, but all its tasks are played in environments, "
                "whose steps say what an attempt is worth: leave it out"
            )
    judged = [
        task for task in (*tasks.train, *tasks.held_out) if task.environment is None and task.domain not in set_rewards
    ]
    judged_domains = {task.domain if config.domains else "" for task in judged}
    for name, (setting, rule) in zip(config.domains or [""], rules_of(config).items(), strict=True):
        if name not in judged_domains and (given or (rule.name, rule.options, rule.parts) != (RewardRule().name, {}, {})):
            raise UserError(
                f"{setting} is {'a function' if given else repr(rule.label)}, but all its tasks are played in "
                "environments, whose steps say what an attempt is worth: leave it out"
            )


def _check_formats(config: Config) -> None:
    """Refuses built-in rewards that cannot judge the tasks of a named format."""
    sources = {f"domains.{name}.tasks": domain.tasks for name, domain in config.domains.items()} or {
        "tasks": config.tasks
    }
    judged = list(zip(sources.items(), rules_of(config).items(), strict=True))
    for name, each in config.eval.sets.items():
        setting = "reward" if each.reward is None else f"eval.sets.{name}.reward"
        judged.append(((f"eval.sets.{name}", each), (setting, each.reward or config.reward)))
    for (within, source), (setting, rule) in judged:
        name = str(source.options.get("format"))
        format = FORMATS.get(name)
        names = {part.name for part in rule.parts.values() if part.weight or part.gate} or {rule.name}
        judging = names - SHAPE_REWARDS
        if format is not None and judging and judging <= BUILTINS.keys() - {*format.rewards, *EXTERNAL_REWARDS}:
            raise UserError(
                f"{within}.options.format is {name!r}, but {setting} is {rule.label!r}, which cannot judge its "
                f"tasks: write {setting}: {format.rewards[0]} (docs/guides/tasks.md)"
            )


def _check_votes(config: Config, tasks: TaskSet, reward_spec: RewardSpec) -> None:
    """Refuses maj@k if the reward cannot extract the answer of a response."""
    for task in {task.domain: task for task in tasks.held_out}.values():
        name = set_of(task.domain)
        if not config.eval.settings(name).majority_at:
            continue
        where = f"eval.sets.{name}" if name in config.eval.sets else "eval"
        if any(other.environment is not None for other in tasks.held_out if other.domain == task.domain):
            raise UserError(
                f"{where}.majority_at is set, but its tasks are played in environments, where there is no answer to vote "
                f"by: write {where}.majority_at=[]"
            )
        if not reward_spec.reads_answers(task.domain):
            setting = f"domains.{task.domain}.reward" if task.domain in config.domains else "the reward"
            setting = (
                f"{where}.reward" if name in config.eval.sets and config.eval.sets[name].reward is not None else setting
            )
            raise UserError(
                f"{where}.majority_at is set, but {setting} does not say which answer a response gives: use number, "
                "math, choice or exact (of a composed reward, in one part only), give your own a method answer_of(task, "
                f"response), or write {where}.majority_at=[]"
            )


def _check_limits(config: Config, tasks: TaskSet) -> None:
    """Refuses a limit for an environment that no task uses."""
    environments = {task.environment.name for task in (*tasks.train, *tasks.held_out) if task.environment is not None}
    for name in config.env.limits:
        if name not in environments:
            played = (
                f"tasks are played in {', '.join(sorted(environments))}"
                if environments
                else "no task is played in an environment"
            )
            raise UserError(f"env.limits names {name!r}, but {played}{did_you_mean(name, environments)}")


def _check_turns(config: Config, tasks: TaskSet) -> None:
    """Refuses a turn-level algorithm for tasks without environments."""
    if config.algorithm.turn_weight > 0 and not tasks.has_environments:
        raise UserError(
            f"algorithm.turn_weight is {config.algorithm.turn_weight:g}: it compares turns that began in the same state, "
            "but these tasks have no environment: write algorithm.turn_weight=0, or choose tasks with environments"
        )
