"""Prepares a run: reports every error that can be found before anything is created or started."""

from __future__ import annotations

from typing import Any

from roll.config.root import with_absolute_paths
from roll.config.schema import Config
from roll.data.chat_sources import ChatSource
from roll.data.sources import TaskSet, TaskSource
from roll.pipeline.base import Pipeline
from roll.pipeline.model_checks import check_tasks
from roll.pipeline.preflight import find, find_tasks
from roll.pipeline.registry import pipeline_of
from roll.reward import RewardFn, RewardSpec


def prepare(
    config: Config,
    *,
    reward: RewardFn | None = None,
    tasks: TaskSource | None = None,
    chats: ChatSource | None = None,
    found: Any = None,
) -> Pipeline[Any, Any]:
    """The pipeline that a config names; `reward`, `tasks` and `chats` replace those the config names. `found` is the
    result of an earlier `preflight.find`."""
    config = with_absolute_paths(config)
    found = find(config, reward=reward, tasks=tasks, chats=chats) if found is None else found
    return pipeline_of(config).prepare(config, found)


def check(
    config: Config, *, reward: RewardFn | None = None, tasks: TaskSource | None = None
) -> tuple[TaskSet, RewardSpec]:
    """The tasks and the reward of a run with rollouts, checked together with the model."""
    config = with_absolute_paths(config)
    task_set, reward_spec = find_tasks(config, reward, tasks)
    return check_tasks(config, task_set, reward_spec), reward_spec
