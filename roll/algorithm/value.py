"""What a critic learns from."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(values: Tensor, before: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Half the squared error of each prediction. A prediction further than `clip` from the one the step began with is
    also judged as if it had stopped there, and the larger error counts: moving further gains nothing."""
    loss = (values - returns) ** 2
    if clip is not None:
        loss = torch.maximum(loss, (before + (values - before).clamp(-clip, clip) - returns) ** 2)
    return loss / 2
