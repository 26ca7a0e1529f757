"""Rewards that a program passes as functions, alone or composed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.config.errors import UserError
from roll.reward.base import RewardFn
from roll.reward.builtin import ROLE_REWARDS
from roll.reward.compose import Composed, WeightedPart
from roll.reward.factory import callable_reward, check_built_in, make


def compose_given(parts: Mapping[str, Mapping[str, Any]], functions: Mapping[str, RewardFn]) -> Composed:
    """A weighted sum of named parts, described by settings; some are functions, whose options are their arguments."""
    rewards = {name: _reward(name, part, functions.get(name)) for name, part in parts.items()}
    return Composed({name: WeightedPart(**part) for name, part in parts.items()}, rewards)


def check_no_roles(parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuses parts that a role's model gives: roles are queried before the grader, which does not work with
    functions."""
    for name, part in parts.items():
        if part.get("name") in ROLE_REWARDS:
            raise UserError(
                f"reward.parts.{name} is {part['name']}, whose value a role's model gives, and it cannot be combined "
                "with functions: name those as 'file.py:name'"
            )


def _reward(name: str, part: Mapping[str, Any], function: RewardFn | None) -> RewardFn:
    where = f"reward.parts.{name}"
    if function is not None:
        if part.get("options"):
            raise UserError(f"{where}.options is set, but the part is a function: write functools.partial(function, …)")
        return callable_reward(part["name"], function, where)
    check_built_in(part["name"], part.get("options", {}), where)
    return make(part["name"], part.get("options", {}), where=where)
