"""The built-in rewards: name and import path. A module is imported when its reward is first used."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from roll.config.registry import Registry

BUILTINS: Mapping[str, str] = MappingProxyType(
    {
        "choice": "roll.reward.choice:Choice",
        "code": "roll.reward.code:Code",
        "exact": "roll.reward.match:Exact",
        "format": "roll.reward.format:FormatReward",
        "fuzzy": "roll.reward.match:Fuzzy",
        "http": "roll.reward.http_reward:HttpReward",
        "instructions": "roll.reward.instructions:Instructions",
        "judge": "roll.reward.judge_factory:judge",
        "length": "roll.reward.length:Length",
        "math": "roll.reward.maths:Math",
        "number": "roll.reward.numbers:Number",
        "reasoning_gym": "roll.reward.reasoning_gym:ReasoningGym",
        "repetition": "roll.reward.repetition:RepetitionPenalty",
        "reward_model": "roll.reward.model_reward:ModelScore",
    }
)
"""What to call with the reward's options: a class whose instances are rewards, or a function that returns one."""

REWARDS = Registry("reward", "roll.rewards", BUILTINS)

SHAPE_REWARDS = frozenset({"format", "length", "repetition"})
"""Rewards that judge only the form of a text, whatever the task."""

ROLE_REWARDS = ("judge", "reward_model")
"""Rewards that a model role computes."""

EXTERNAL_REWARDS = frozenset({"http", *ROLE_REWARDS})
"""Rewards that a service or a model computes, so that they can judge any task."""
