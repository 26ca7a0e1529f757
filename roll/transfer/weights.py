"""Weights from the trainer to the engines: every publish has a version, and is checked before anything is served.

In one process the engine uses the trainer's own parameters, so publishing moves nothing. What is checked: the engine's
parameters are the very storage the trainer writes, and the log-probs both compute for a fixed prompt agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from roll.config.errors import RunError

PROBE_TOKENS = 12
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.35}
"""Largest mean difference of the probe's log-probs that kernels of a precision may cause."""


@dataclass(frozen=True)
class Weights:
    """One version of the weights, by reference: the model whose parameters they are, and the probe the trainer ran."""

    version: int
    model: PreTrainedModel
    parameters: dict[str, Tensor]
    probe: Tensor
    """Token ids of the fixed prompt."""
    log_probs: Tensor
    """The trainer's log-probs of the probe's tokens after the first."""


def probe_ids(vocab: int) -> Tensor:
    """A fixed prompt for a vocabulary: tokens spread over it."""
    return torch.arange(1, PROBE_TOKENS + 1) * 7919 % vocab


def check_probe(weights: Weights, log_probs: Tensor) -> None:
    """Raises when an engine's log-probs of the probe differ from the trainer's by more than kernels do."""
    dtype = next(weights.model.parameters()).dtype
    difference = float((log_probs - weights.log_probs).abs().mean())
    allowed = PROBE_TOLERANCE[dtype]
    if not difference <= allowed:
        raise RunError(
            f"the engine's weights are not the trainer's: at version {weights.version} the log-probs of the probe "
            f"prompt differ by {difference:.4f} on average, at most {allowed} is kernel noise"
        )


def check_shared(weights: Weights, model: PreTrainedModel) -> None:
    """Raises when a parameter of the engine's model is not the trainer's storage."""
    for name, parameter in model.named_parameters():
        if name not in weights.parameters or parameter.data_ptr() != weights.parameters[name].data_ptr():
            raise RunError(f"the engine's tensor {name!r} is not the trainer's: version {weights.version} not loaded")
