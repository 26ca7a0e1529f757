"""The class that ROLL adds to vLLM's workers through `worker_extension_cls`. Loaded inside vLLM's own processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from roll.model.hf_state_dict import checkpoint_form
from roll.weight_sync.host_copy import read


class _Worker(Protocol):
    """The parts of a vLLM worker that are used here."""

    device: torch.device
    model_config: Any
    model_runner: Any

    def reload_weights(self, *, weights_iterator: Iterable[tuple[str, Tensor]]) -> None: ...


class RollWorker:
    """Its methods are called by name on every worker of an engine. Their names start with `roll_` because vLLM refuses an
    extension with names that its own worker has."""

    def roll_load(self: _Worker, path: str, inode: int, nbytes: int, pieces: Sequence[Sequence[Any]]) -> None:
        """Loads the tensors at an address in host memory in place of the current weights."""
        tensors = read(path, inode, nbytes, pieces)
        self.reload_weights(weights_iterator=checkpoint_form(self.model_config.hf_config, tensors))
        if self.device.type == "cpu":
            _pack_experts(self.model_runner.get_model())


def _pack_experts(model: torch.nn.Module) -> None:
    """Packs experts into the layout that vLLM's CPU kernels read. vLLM does this when it first loads a model, but not
    when weights are reloaded (vLLM 0.32). If this were wrong, the probe check would fail."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)
