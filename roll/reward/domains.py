"""The rewards of several domains as one: each task is judged by its own domain's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.data.task import Response, Task
from roll.reward.base import RewardFn, is_deterministic
from roll.reward.compose import warm_up


class ByDomain:
    """What always holds: nothing but a task's domain decides who judges it."""

    def __init__(self, rewards: Mapping[str, RewardFn]) -> None:
        self._rewards = rewards

    def __call__(self, task: Task, response: Response) -> Any:
        return self._of(task)(task, response)

    def deterministic(self, task: Task) -> bool:
        """Whether the reward of the task's domain gives the same verdict every time."""
        return is_deterministic(self._of(task), task)

    def warm_up(self) -> None:
        """Warms up those of all domains."""
        for reward in self._rewards.values():
            warm_up(reward)

    def _of(self, task: Task) -> RewardFn:
        if task.domain not in self._rewards:
            raise ValueError(
                f"no reward is for the domain {task.domain!r} of task {task.id!r}: {', '.join(self._rewards)}"
            )
        return self._rewards[task.domain]
