"""The rewards that come with ROLL: where each is made. A module is loaded when its reward is first asked for."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

BUILTINS: Mapping[str, str] = MappingProxyType(
    {
        "math": "roll.reward.maths:Math",
        "number": "roll.reward.numbers:Number",
        "reasoning_gym": "roll.reward.reasoning_gym:ReasoningGym",
    }
)
"""What each name calls with the reward's options: a class whose instances are rewards, or a function that returns one."""
