"""Losses that are not finite; in a file of their own, because trainers in other processes import it."""

from __future__ import annotations

from typing import Any


def sick_if_odd(inputs: Any) -> Any:
    """A loss that is not finite where it sees an odd number of samples."""
    from roll.algorithm.loss_inputs import TokenLoss

    return TokenLoss(inputs.current / (inputs.sample.max() % 2))
