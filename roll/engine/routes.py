"""MoE routes that an engine records beside the keys and values of the same positions.

Invariant: the routes at a cache position are the experts its row was routed to when its keys and values were computed.
They move with the keys and values: to another sample of the group, to the next turn, to a larger cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from roll.config.errors import UserError
from roll.data.routes import Routes, routes_type
from roll.model.experts import experts_of
from roll.model.routing import reports_choices, router_weights_of, routers_of
from roll.model.shape import names_experts


@dataclass(frozen=True)
class RouteShape:
    """The routes of one position: how many expert numbers it has, and how many experts a layer has."""

    width: int
    experts: int

    @classmethod
    def of(cls, model: nn.Module) -> RouteShape | None:
        """The shape for a model; None for a model without experts."""
        routers: list[Any] = routers_of(model)
        if not routers:
            return None
        return cls(sum(router.top_k for router in routers), max(router.num_experts for router in routers))

    @property
    def dtype(self) -> torch.dtype:
        """Same number of bits as `routes_type`; torch has no arithmetic for unsigned integers but bytes."""
        return torch.uint8 if routes_type(self.experts) == np.uint8 else torch.int16

    @property
    def bytes_per_token(self) -> int:
        return self.width * self.dtype.itemsize

    def host(self, rows: Tensor) -> Routes:
        """Converts routes that are on the host to the type that a token log uses."""
        numbers: Routes = rows.numpy().view(routes_type(self.experts))
        return numbers


@dataclass(frozen=True)
class ExpertLayers:
    """Indices of the layers with experts, for an engine that reports routes of all layers."""

    numbers: tuple[int, ...]
    shape: RouteShape

    @classmethod
    def of(cls, config: PretrainedConfig) -> ExpertLayers | None:
        """From a model on the meta device; None for a model without experts. Raises for an MoE model whose routers cannot
        be recorded."""
        if not names_experts(config):
            return None
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        _check_routers(model)
        shape, layers = RouteShape.of(model), model.get_decoder().layers
        return None if shape is None else cls(tuple(i for i, layer in enumerate(layers) if routers_of(layer)), shape)

    def routes(self, reported: NDArray[Any]) -> Routes:
        """[tokens, all layers, chosen] → the layout of a token log."""
        selected = reported[:, list(self.numbers)].reshape(len(reported), self.shape.width)
        return selected.astype(routes_type(self.shape.experts))


def _check_routers(model: nn.Module) -> None:
    """Raises if the model has experts whose routers cannot be recorded. The model may be on the meta device."""
    routers = routers_of(model)
    named = any(name.rpartition(".")[2] in ("experts", "router") for name, _ in model.named_modules())
    kinds = {type(router): router for router in routers}
    known = len(routers) >= len(experts_of(model)) and all(map(_is_known, kinds.values()))
    if (named or routers) and not (routers and known):
        raise UserError(
            f"rollout.router_replay is true, but how {type(model).__name__} sends tokens to its experts is not known: "
            "write rollout.router_replay=false"
        )


def _is_known(router: nn.Module) -> bool:
    """Whether the router's output can be recorded and replayed: runs it on a few rows with random weights."""
    noise = torch.Generator().manual_seed(0)
    candidate: Any = copy.deepcopy(router).to_empty(device="cpu").float().eval()
    with torch.no_grad():
        for tensor in chain(candidate.parameters(), candidate.buffers()):
            tensor.normal_(std=0.02, generator=noise) if tensor.is_floating_point() else tensor.zero_()
        try:
            output = candidate(torch.randn(8, candidate.weight.shape[1], generator=noise))
            if not reports_choices(candidate, output):
                return False
            router_weights_of(candidate, *output)
        except Exception:  # it has other inputs, or an unknown way to weight experts
            return False
    return True


class RouteRecorder:
    """Records the choices of a model's routers while the model's own code computes rows."""

    def __init__(self, model: nn.Module) -> None:
        self._routers = routers_of(model)

    def record(self, forward: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """The result of `forward`, and the routes of its rows, [rows, width]."""
        chosen: list[Tensor] = []

        def keep(router: nn.Module, inputs: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
            chosen.append(output[2])

        hooks = [router.register_forward_hook(keep) for router in self._routers]
        try:
            result = forward()
        finally:
            for hook in hooks:  # others may use the model too
                hook.remove()
        assert len(chosen) == len(self._routers), "a pass goes through every router once"
        return result, torch.cat(chosen, dim=1)
