"""Group filters: which finished groups are worth training on. A filter names its reason, or None to keep the group."""

from __future__ import annotations

from collections.abc import Callable

from roll.data.sample import Group

Filter = Callable[[Group], str | None]


def no_signal(group: Group) -> str | None:
    """Samples with equal rewards have no advantage over each other."""
    rewards = {sample.reward for sample in group.scored}
    return "no signal: all rewards equal" if len(rewards) < 2 else None


def keep_all(group: Group) -> str | None:
    return None


FILTERS: dict[str, Filter] = {"no_signal": no_signal, "none": keep_all}
