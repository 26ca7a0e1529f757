"""Advantages, losses and the algorithms built from them: pure functions, and one class that combines them.

Modules that need torch are loaded on first use, so that an invalid setting is refused without importing it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll.config.lazy import lazily

if TYPE_CHECKING:
    from roll.algorithm.base import Algorithm, make_algorithm
    from roll.algorithm.loss_inputs import CorrectionSpec, CreditSpec, LossInputs, LossSpec, TokenLoss

__all__ = ["Algorithm", "CorrectionSpec", "CreditSpec", "LossInputs", "LossSpec", "TokenLoss", "make_algorithm"]

__getattr__ = lazily(
    __name__,
    {
        "roll.algorithm.base": ("Algorithm", "make_algorithm"),
        "roll.algorithm.loss_inputs": ("CorrectionSpec", "CreditSpec", "LossSpec", "LossInputs", "TokenLoss"),
    },
)
