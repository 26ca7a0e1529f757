"""What an engine records of a mixture's routers, beside the keys and values of the same positions.

What always holds: a position of the cache says which experts its row was sent to when its keys and values were computed,
wherever these go: to a sibling, to the next turn, to a larger cache.
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
from roll.model.routing import routers_of, says_choices, weighing_of
from roll.model.shape import names_experts


@dataclass(frozen=True)
class RouteShape:
    """The routes of one position: how many numbers they are, and how many experts a layer has."""

    width: int
    experts: int

    @classmethod
    def of(cls, model: nn.Module) -> RouteShape | None:
        """None for a model without experts."""
        routers: list[Any] = routers_of(model)
        if not routers:
            return None
        return cls(sum(router.top_k for router in routers), max(router.num_experts for router in routers))

    @property
    def dtype(self) -> torch.dtype:
        """Of the same bits as `routes_type` has; torch computes with no unsigned numbers but bytes."""
        return torch.uint8 if routes_type(self.experts) == np.uint8 else torch.int16

    @property
    def bytes_a_token(self) -> int:
        return self.width * self.dtype.itemsize

    def host(self, rows: Tensor) -> Routes:
        """Rows of a cache, which are on the host, as a token log has them."""
        numbers: Routes = rows.numpy().view(routes_type(self.experts))
        return numbers


@dataclass(frozen=True)
class ExpertLayers:
    """Where among all layers of a model those with experts are, for an engine that tells of all."""

    numbers: tuple[int, ...]
    shape: RouteShape

    @classmethod
    def of(cls, config: PretrainedConfig) -> ExpertLayers | None:
        """As a model without storage has them; None for one without experts. Refuses a mixture whose routers are
        none that can be recorded."""
        if not names_experts(config):
            return None
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        _check_routers(model)
        shape, layers = RouteShape.of(model), model.get_decoder().layers
        return None if shape is None else cls(tuple(i for i, layer in enumerate(layers) if routers_of(layer)), shape)

    def routes(self, told: NDArray[Any]) -> Routes:
        """[tokens, all layers, chosen] → as a token log has them."""
        own = told[:, list(self.numbers)].reshape(len(told), self.shape.width)
        return own.astype(routes_type(self.shape.experts))


def _check_routers(model: nn.Module) -> None:
    """Of a model without storage."""
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
    """Whether what it gives can be recorded and replayed: tried on a few rows, with weights that are noise."""
    noise = torch.Generator().manual_seed(0)
    tried: Any = copy.deepcopy(router).to_empty(device="cpu").float().eval()
    with torch.no_grad():
        for tensor in chain(tried.parameters(), tried.buffers()):
            tensor.normal_(std=0.02, generator=noise) if tensor.is_floating_point() else tensor.zero_()
        try:
            given = tried(torch.randn(8, tried.weight.shape[1], generator=noise))
            if not says_choices(tried, given):
                return False
            weighing_of(tried, *given)
        except Exception:  # it takes something else, or weighs in a way that is not known
            return False
    return True


class RouteRecorder:
    """Listens to a model's routers while rows are computed by its own code."""

    def __init__(self, model: nn.Module) -> None:
        self._routers = routers_of(model)

    def record(self, forward: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """What `forward` gives, and where its rows went, [rows, width]."""
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
