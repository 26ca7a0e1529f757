"""The rewards of several domains as one: the reward of a task's domain judges it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.data.task import Response, Task
from roll.reward.base import RewardFn, answer_of, is_deterministic
from roll.reward.compose import warm_up


class ByDomain:
    """Invariant: only a task's domain decides which reward judges it. `others` judges the tasks of domains without a
    reward of their own."""

    def __init__(self, rewards: Mapping[str, RewardFn], others: RewardFn | None = None) -> None:
        self._rewards = rewards
        self._others = others

    def __call__(self, task: Task, response: Response) -> Any:
        return self._of(task)(task, response)

    def deterministic(self, task: Task) -> bool:
        """Whether the reward of the task's domain is deterministic."""
        return is_deterministic(self._of(task), task)

    def answer_of(self, task: Task, response: Response) -> str | None:
        """The answer that the reward of the task's domain extracts."""
        return answer_of(self._of(task), task, response)

    def of(self, domain: str) -> RewardFn | None:
        """The reward of a domain."""
        return self._rewards.get(domain, self._others)

    def warm_up(self) -> None:
        """Warms up the rewards of all domains."""
        for reward in self._rewards.values():
            warm_up(reward)
        if self._others is not None:
            warm_up(self._others)

    def _of(self, task: Task) -> RewardFn:
        reward = self.of(task.domain)
        if reward is None:
            raise ValueError(
                f"no reward is for the domain {task.domain!r} of task {task.id!r}: {', '.join(self._rewards)}"
            )
        return reward
