"""The loss of a critic."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(values: Tensor, before: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Half the squared error of each predicted value. With `clip`, the error is also computed for the value clipped to at
    most `clip` from the one before the step, and the larger error counts, so that moving further gains nothing."""
    loss = (values - returns) ** 2
    if clip is not None:
        loss = torch.maximum(loss, (before + (values - before).clamp(-clip, clip) - returns) ** 2)
    return loss / 2
