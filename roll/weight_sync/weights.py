"""Versions of the weights: every publish has a version, and the engine verifies it before it serves it.

In one process the engine uses the trainer's own parameters, so publishing copies nothing. The engine then checks that its
parameters are the storage that the trainer writes, and that the log-probs of both for a probe prompt agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from roll.config.errors import RunError

PROBE_TOKENS = 12
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.35}
"""Largest mean absolute difference of the probe's log-probs that different kernels may cause, by dtype."""
QUANTIZED_TOLERANCE = 1.5
"""The same for an engine that quantizes the weights: 0.42 was measured with FP8; wrong weights differ by several."""


@dataclass(frozen=True)
class Weights:
    """One version of the weights, by reference: the trainer's model and parameters, and its log-probs of the probe."""

    version: int
    model: PreTrainedModel
    parameters: dict[str, Tensor]
    probe: Tensor
    """Token ids of the fixed prompt."""
    log_probs: Tensor
    """The trainer's log-probs of the probe's tokens after the first."""

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = next(self.model.parameters()).dtype
        return dtype


class HasProbe(Protocol):
    """A version of the weights with the trainer's probe: `Weights` in one process, a `WeightManifest` between two."""

    @property
    def version(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def log_probs(self) -> Tensor: ...


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters and persistent buffers, each storage once: tied ones under their first name."""
    tensors: dict[str, Tensor] = {}
    seen: set[tuple[object, ...]] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            continue  # a module's extra state may be anything
        identity: tuple[object, ...] = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if isinstance(tensor, DTensor):  # a DTensor has no storage of its own; tied parameters are one object
            identity = (id(tensor),)
        if tensor.numel() == 0 or identity not in seen:
            seen.add(identity)
            tensors[name] = tensor.detach()
    return tensors


def probe_ids(vocab: int) -> Tensor:
    """The probe prompt for a vocabulary: a fixed set of tokens spread over it."""
    return torch.arange(1, PROBE_TOKENS + 1) * 7919 % vocab


def check_probe(weights: HasProbe, log_probs: Tensor, *, quantized: bool = False) -> None:
    """Raises `RunError` if an engine's log-probs of the probe differ from the trainer's by more than the tolerance."""
    difference = float((log_probs - weights.log_probs).abs().mean())
    allowed = QUANTIZED_TOLERANCE if quantized else PROBE_TOLERANCE[weights.dtype]
    if not difference <= allowed:
        raise RunError(
            f"the engine's weights are not the trainer's: at version {weights.version} the log-probs of the probe "
            f"prompt differ by {difference:.4f} on average, at most {allowed} is kernel noise"
        )


def check_shared(weights: Weights, model: PreTrainedModel) -> None:
    """Raises `RunError` if a parameter of the engine's model does not share the trainer's storage."""
    for name, parameter in model.named_parameters():
        if name not in weights.parameters or parameter.data_ptr() != weights.parameters[name].data_ptr():
            raise RunError(f"the engine's tensor {name!r} is not the trainer's: version {weights.version} not loaded")
