"""The rewards that come with ROLL: where each is made. A module is loaded when its reward is first asked for."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

BUILTINS: Mapping[str, str] = MappingProxyType(
    {
        "choice": "roll.reward.choice:Choice",
        "code": "roll.reward.code:Code",
        "exact": "roll.reward.match:Exact",
        "format": "roll.reward.format:FormatReward",
        "fuzzy": "roll.reward.match:Fuzzy",
        "http": "roll.reward.http_reward:HttpReward",
        "instructions": "roll.reward.instructions:Instructions",
        "judge": "roll.reward.judge:judge",
        "length": "roll.reward.length:Length",
        "math": "roll.reward.maths:Math",
        "number": "roll.reward.numbers:Number",
        "reasoning_gym": "roll.reward.reasoning_gym:ReasoningGym",
        "repetition": "roll.reward.repetition:RepetitionPenalty",
        "reward_model": "roll.reward.model_reward:ModelScore",
    }
)
"""What each name calls with the reward's options: a class whose instances are rewards, or a function that returns one."""

OF_SHAPE = frozenset({"format", "length", "repetition"})
"""Those that never look at a task: how a text is written is all they judge."""

OF_ROLES = ("judge", "reward_model")
"""Those that a role may give."""

ASKS_OTHERS = frozenset({"http", *OF_ROLES})
"""Those that somebody else decides for, so that they may judge any task."""
