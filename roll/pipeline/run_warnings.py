"""Warnings about a run that can start: they are reported, and the run continues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from roll.config.reward import RewardRule
from roll.config.schema import Config
from roll.data.sources import TaskSet
from roll.data.task import Task
from roll.reward.builtin import SHAPE_REWARDS


def run_warnings(config: Config, tasks: TaskSet, rules: Mapping[str, RewardRule]) -> list[str]:
    """`rules` are the config's rewards, by the setting that names them."""
    return [*_left_out(tasks), *_skipped(tasks), *_nothing_held_out(tasks), *_answers_unread(config, tasks, rules)]


def _left_out(tasks: TaskSet) -> Iterator[str]:
    if tasks.left_out:
        total = len(tasks.left_out) + len(tasks.train) + len(tasks.held_out)
        yield (
            f"{len(tasks.left_out)} of {total} tasks are left out, because their prompts are too long "
            f"(tasks.too_long: drop): {_listed(tasks.left_out)}"
        )


def _skipped(tasks: TaskSet) -> Iterator[str]:
    if tasks.skipped:
        yield (
            f"{len(tasks.skipped)} rows are left out, as the option skip or the format says (docs/guides/tasks.md): "
            f"{_listed(tasks.skipped)}"
        )


def _nothing_held_out(tasks: TaskSet) -> Iterator[str]:
    if not tasks.held_out:
        yield "no tasks are held out, so nothing is evaluated: see held_out in docs/guides/tasks.md"


def _answers_unread(config: Config, tasks: TaskSet, rules: Mapping[str, RewardRule]) -> Iterator[str]:
    for setting, rule in rules.items():
        judging = {part.name for part in rule.parts.values() if part.weight or part.gate} or {rule.name}
        judged = (task for task in tasks.train if _setting(task, config) == setting)
        if judging <= SHAPE_REWARDS and any(task.answer is not None and task.environment is None for task in judged):
            yield (
                f"{setting}: nothing in it looks at the answers of the tasks, only at the shape of a text "
                f"({', '.join(sorted(judging))}): give a part such as number, math or exact a weight "
                "(docs/guides/rewards.md)"
            )


def _setting(task: Task, config: Config) -> str:
    return f"domains.{task.domain}.reward" if config.domains else "reward"


def _listed(ids: tuple[str, ...], most: int = 3) -> str:
    return ", ".join(map(repr, ids[:most])) + (" …" if len(ids) > most else "")
