"""Wraps the decoder's layers in the trainer's passes: plain, compiled, or with activation checkpointing.

The engine may use the same model, with different passes. So layers are wrapped only while a pass of the trainer runs. One
compiled function serves all layers of a decoder, for any number of packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from roll.config.errors import UserError
from roll.strategy.train.tree_attention import attends_varlen

Forward = Callable[..., Any]
Within = Callable[[], AbstractContextManager[None]]
Compiling = Literal["auto", "on", "off"]


def compiles(mode: Compiling, device: str, dtype: torch.dtype, *, adapted: bool, tensor: int = 1) -> bool:
    """Whether a trainer compiles its layers. Adapters take minutes to compile; padded attention breaks the graph of a
    layer, and the rest may not be worth compiling. Layers divided over `tensor` ranks cannot be compiled with dynamic
    shapes: torch 2.13 recurses without end in the backward pass of their DTensors."""
    if mode == "on" and tensor > 1:
        raise UserError(
            f"train.compile is on, but layers that are divided over parallel.tensor={tensor} cannot be compiled: write "
            "train.compile=auto"
        )
    pays = attends_varlen(device, dtype) and not adapted and tensor == 1
    return {"on": True, "off": False, "auto": pays}[mode]


class LayerWrapping:
    def __init__(self, model: PreTrainedModel, *, compiled: bool) -> None:
        self._layers: list[nn.Module] = list(model.get_decoder().layers)
        kinds = {type(layer): type(layer).forward for layer in self._layers} if compiled else {}
        # A recomputed layer must apply the same dropout.
        self._noisy = any(isinstance(part, nn.Dropout) and part.p > 0 for part in model.modules())
        self._compiled: dict[type[nn.Module], Forward] = {k: torch.compile(f, dynamic=True) for k, f in kinds.items()}

    @contextmanager
    def running(self, *, checkpointed: bool, within: Within | None = None) -> Iterator[None]:
        """Wraps the layers for one pass of the trainer. Each layer runs inside the context that `within` returns, also
        when a backward pass recomputes it, which may be much later."""
        if not (self._compiled or checkpointed or within):
            yield
            return
        for layer in self._layers:
            forward: Forward = partial(self._compiled.get(type(layer), type(layer).forward), layer)
            if within is not None:
                forward = partial(_inside, within, forward)
            layer.forward = partial(_checkpointed, forward, self._noisy) if checkpointed else forward
        try:
            yield
        finally:
            for layer in self._layers:
                del layer.forward


def _inside(within: Within, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    with within():
        return forward(*args, **kwargs)


def _checkpointed(forward: Forward, noisy: bool, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=noisy, **kwargs)
