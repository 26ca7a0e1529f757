"""What ROLL adds to vLLM's workers: the class that `worker_extension_cls` names. Loaded inside vLLM's own processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from roll.model.hf_state_dict import checkpoint_form
from roll.weight_sync.host_copy import read


class _Worker(Protocol):
    """As far as a worker of vLLM is known here."""

    device: torch.device
    model_config: Any
    model_runner: Any

    def reload_weights(self, *, weights_iterator: Iterable[tuple[str, Tensor]]) -> None: ...


class RollWorker:
    """Its methods are called by name, on every worker of an engine; their names begin with `roll_` because vLLM refuses
    to add what a worker of its own has already."""

    def roll_load(self: _Worker, path: str, inode: int, nbytes: int, pieces: Sequence[Sequence[Any]]) -> None:
        """Loads the tensors at an address in place of those it has."""
        tensors = read(path, inode, nbytes, pieces)
        self.reload_weights(weights_iterator=checkpoint_form(self.model_config.hf_config, tensors))
        if self.device.type == "cpu":
            _pack_experts(self.model_runner.get_model())


def _pack_experts(model: torch.nn.Module) -> None:
    """Brings experts into the order that vLLM's kernels for CPUs read: so they are once a model is loaded, but loading it
    again leaves them as they came (vLLM 0.32). Were it otherwise, the probe would say so."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)
