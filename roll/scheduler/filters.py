"""Group filters: which finished groups are worth training on. A filter returns its reason to drop a group, or None.

A user's filter is a function of a group that returns a reason or None, or True to keep it and False to drop it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

import numpy as np

from roll.algorithm.advantages import returns_of, turn_relative
from roll.config.errors import RunError, UserError
from roll.config.user_code import load_user_code
from roll.data.sample import Group

Filter = Callable[[Group], str | None]


def no_signal(group: Group) -> str | None:
    """Drops groups whose rewards, including the greedy baseline's, are all equal: all advantages would be zero."""
    rewards = {sample.reward for sample in group.scored}
    if group.baseline is not None:
        rewards.add(group.baseline.reward)
    return "no signal: all rewards equal" if len(rewards) < 2 else None


def no_signal_in_turns(discount: float) -> Filter:
    """`no_signal` for per-turn credit (GiGPO): turns of a group that start in the same state are compared by their
    discounted returns, so a group with equal rewards may still have a signal, for example two paths to the goal of
    different lengths."""

    def judge(group: Group) -> str | None:
        reason = no_signal(group)
        if reason is None:
            return None
        turns = [sample.turn_rewards for sample in group.scored]
        states = np.array([state for sample in group.scored for state in sample.turn_states])
        rewards, offsets = np.array([reward for some in turns for reward in some]), np.cumsum([0, *map(len, turns)])
        if turn_relative(returns_of(rewards, offsets, discount), states, np.zeros(len(states)), False).any():
            return None
        return f"{reason}, also those of turns in the same state"

    return judge


def keep_all(group: Group) -> str | None:
    return None


def mean_range(low: float, high: float) -> Filter:
    """Keeps groups whose mean reward is from low to high, both included: neither too hard nor too easy."""
    if not low <= high:
        raise UserError(f"rollout.filter_range is {low:g} to {high:g}: write the lower bound first")

    def in_range(group: Group) -> str | None:
        mean = fmean([sample.reward for sample in group.scored] or [0.0])
        return None if low <= mean <= high else f"mean reward out of range: {mean:.3g} is not in {low:g} to {high:g}"

    return in_range


FILTERS: dict[str, Filter] = {"no_signal": no_signal, "none": keep_all}


def by_domain(filters: Mapping[str, Filter], default: Filter) -> Filter:
    """Filters each group with the filter of its task's domain, or with `otherwise`."""
    return lambda group: filters.get(group.task.domain, default)(group)


def make_filter(
    name: str,
    low: float = 0.0,
    high: float = 1.0,
    root: str | os.PathLike[str] | None = None,
    setting: str = "rollout.filter",
    turn_discount: float | None = None,
) -> Filter:
    """The filter of that name: one of `FILTERS`, `mean_range` with these bounds, or a user's function. `setting` is the
    config key for error messages. With a `turn_discount`, `no_signal` also compares turns that start in the same
    state."""
    if name == "no_signal" and turn_discount is not None:
        return no_signal_in_turns(turn_discount)
    if name in FILTERS:
        return FILTERS[name]
    if name == "mean_range":
        return mean_range(low, high)
    return _user_filter(name, load_user_code(name, what=setting, known=[*FILTERS, "mean_range"], root=root))


def _user_filter(name: str, function: Callable[[Group], Any]) -> Filter:
    def judge(group: Group) -> str | None:
        try:
            verdict = function(group)
        except Exception as error:
            raise RunError(
                f"the filter {name!r} failed on group {group.index} of task {group.task.id!r}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if verdict is False:
            return f"filtered: by {name}"
        if verdict is None or verdict is True:
            return None
        if isinstance(verdict, str) and verdict:
            return verdict
        raise RunError(
            f"the filter {name!r} returned {verdict!r}: return the reason to drop a group or None to keep it, "
            "or True to keep it and False to drop it"
        )

    return judge
