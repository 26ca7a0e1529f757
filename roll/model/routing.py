"""The routers of a mixture of experts: which experts each row went to, recorded and replayed.

A router chooses some experts for a row and weighs them by its logits. An engine and a trainer that round differently may
choose differently for the same token, and then compute with other experts. So an engine records its choices
(`recording`) and a trainer makes them again (`replaying`): the experts are the engine's, the weights are computed from
the trainer's own logits, and have gradients.

What always holds: a choice that was not recorded (`FREE`) is the router's own. How a family weighs the experts that it
has chosen is tried out on its own choices when its choices are replayed for the first time; a router of which that is
not known is refused.

Routers of `transformers` give (logits, weights, choices) of [rows, experts], [rows, chosen] and [rows, chosen].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from roll.config.errors import UserError

FREE = -1
"""Where a row's experts were not recorded."""

Weigh = Callable[[Tensor, Tensor], Tensor]
"""(logits, choices) → the weights of the chosen experts."""
Routed = tuple[Tensor, Tensor, Tensor]


class Routers:
    """Those of a model, in the order of its layers."""

    def __init__(self, model: nn.Module) -> None:
        self._routers = routers_of(model)
        self._weigh: dict[type[nn.Module], Weigh] = {}
        self._routes: Tensor | None = None
        self._record: list[Tensor] | None = None
        for number, router in enumerate(self._routers):
            router.register_forward_hook(partial(self._routed, number))

    @property
    def layers(self) -> int:
        """Layers that have experts; 0 for a model that is no mixture."""
        return len(self._routers)

    @contextmanager
    def replaying(self, routes: Tensor) -> Iterator[None]:
        """Meanwhile rows go to these experts, [rows, layers, chosen]."""
        self._routes = routes
        try:
            yield
        finally:
            self._routes = None

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """What rows are sent to meanwhile: [rows, chosen] for each layer in order."""
        self._record = []
        try:
            yield self._record
        finally:
            self._record = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _routed(self, number: int, router: nn.Module, inputs: Any, output: Routed) -> Routed | None:
        logits, weights, choices = output
        if self._routes is not None:
            kind = type(router)
            if kind not in self._weigh:
                self._weigh[kind] = weighing_of(router, *output)
            own = self._routes[:, number].to(choices.dtype)
            choices = torch.where(own == FREE, choices, own)
            weights = self._weigh[kind](logits, choices).to(weights.dtype)
        if self._record is not None:
            self._record.append(choices)
        return None if self._routes is None else (logits, weights, choices)


def routers_of(model: nn.Module) -> list[nn.Module]:
    """The modules that send rows to experts, in the order of layers."""
    return [module for module in model.modules() if _routes(module)]


def _routes(module: nn.Module) -> bool:
    return (
        hasattr(module, "top_k")
        and hasattr(module, "num_experts")
        and isinstance(module._parameters.get("weight"), Tensor)
    )


@dataclass(frozen=True)
class Weighing:
    """A family's way from logits to weights."""

    scores: Callable[[Tensor], Tensor]
    normalised: bool
    scale: float

    def __call__(self, logits: Tensor, choices: Tensor) -> Tensor:
        weights = self.scores(logits.float()).gather(1, choices)
        if self.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.scale


def weighing_of(router: nn.Module, logits: Tensor, weights: Tensor, choices: Tensor) -> Weighing:
    """The way that gives the router's own weights for its own choices."""
    scale = float(getattr(router, "routed_scaling_factor", 1.0))
    softmax = partial(torch.softmax, dim=-1)
    close = 1e-5 if weights.dtype == torch.float32 else 2e-2
    for scores in (softmax, torch.sigmoid):
        for normalised in (True, False):
            way = Weighing(scores, normalised, scale)
            found = way(logits.detach(), choices)
            if torch.allclose(found, weights.detach().float(), rtol=close, atol=close):
                return way
    kind = type(router).__name__
    raise UserError(
        f"rollout.router_replay: how {kind} weighs its experts is not known: write rollout.router_replay=false"
    )
