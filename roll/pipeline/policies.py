"""The task sampler, the group filter and the rollout policies that a config names.

Imports neither torch nor transformers: a wrong name is refused before they are imported.
"""

from __future__ import annotations

from roll.config.schema import Config
from roll.config.user_code import load_user_code
from roll.data.sources import TaskSet
from roll.rollout.early_stop import make_early_stop
from roll.scheduler.filters import Filter, by_domain, make_filter
from roll.scheduler.long_tail import make_task_sampler
from roll.scheduler.policy import make_policy
from roll.scheduler.task_sampler import TaskSampler


def check_policies(config: Config, tasks: TaskSet) -> None:
    """Refuses unknown names of task samplers, filters, early stops and policies, and a custom loss that does not
    exist."""
    make_policies(config, tasks)
    make_early_stop(config.rollout.early_stop, config.root)
    make_policy(config.rollout.policy, config.root)
    if ":" in config.algorithm.loss:
        load_user_code(config.algorithm.loss, what="algorithm.loss", root=config.root)


def make_policies(config: Config, tasks: TaskSet) -> tuple[TaskSampler, Filter]:
    """The task sampler, and the filter of finished groups."""
    task_sampler = make_task_sampler(
        tasks.train,
        config.seed,
        config.rollout,
        sampler=config.tasks.sampler,
        weights=config.domain_mix,
        root=config.root,
    )
    return task_sampler, _filter(config)


def _filter(config: Config) -> Filter:
    by_name: dict[str, Filter] = {}
    discount = config.algorithm.turn_discount if config.algorithm.turn_weight > 0 else None
    for name, domain in config.domains.items():
        rollout = domain.rollout(config.rollout)
        setting = "rollout.filter" if domain.filter is None else f"domains.{name}.filter"
        by_name[name] = make_filter(
            rollout.filter, *rollout.filter_range, setting=setting, turn_discount=discount, root=config.root
        )
    common = make_filter(config.rollout.filter, *config.rollout.filter_range, turn_discount=discount, root=config.root)
    return by_domain(by_name, common) if by_name else common
