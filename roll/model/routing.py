"""The routers of a mixture of experts: which experts each packed token ("row") is routed to, replayed and counted.

A router chooses some experts for a row and weights them by its logits. An engine and a trainer that round differently may
choose different experts for the same token. So an engine records its choices (`engine.routes`) and a trainer replays
them: the experts are the engine's, while their weights are computed from the trainer's own logits, with gradients.

Invariants: where no choice was recorded (`FREE`), the router's own choice is used. How a model family computes the
weights of its chosen experts is determined from its own choices, when it is first needed; a router for which that fails
is refused. Outside of `within` routers are unchanged.

Routers of `transformers` return (logits, weights, choices) of [rows, experts], [rows, chosen] and [rows, chosen].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from roll.config.errors import UserError

FREE = -1
"""Marks a row whose experts were not recorded."""

Routed = tuple[Tensor, Tensor, Tensor]


class ExpertLoads(Protocol):
    """A loss that makes routers use their experts evenly."""

    def slopes(self, choices: Tensor, experts: int) -> Tensor:
        """The loss's derivative by each expert's share of a row's scores, [rows, experts]."""
        ...


@dataclass
class RouterPass:
    """Inputs and statistics of the routers in one pass over a micro-batch. A layer whose activations are recomputed
    reports the same statistics again."""

    routes: Tensor | None = None
    """[rows, layers, chosen] the experts to use; None for the routers' own choices."""
    uses: Tensor | None = None
    """[rows] how many tokens of samples each row stands for, 0 for padding; None if nothing is counted."""
    balance: ExpertLoads | None = None
    load: dict[int, Tensor] = field(default_factory=dict)
    """By layer: the tokens that each expert got, [experts]."""
    entropy: dict[int, Tensor] = field(default_factory=dict)
    """By layer: the entropy of the distributions over experts, summed over tokens."""
    balance_loss: dict[int, Tensor] = field(default_factory=dict)
    """By layer."""


class Routers:
    """The routers of a model, in layer order."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = routers_of(model)
        self._scores: dict[type[nn.Module], RouterWeights] = {}
        self._pass: RouterPass | None = None
        for number, router in enumerate(self.modules):
            router.register_forward_hook(partial(self._routed, number))

    @property
    def layers(self) -> int:
        """Number of layers with experts; 0 for a model without experts."""
        return len(self.modules)

    @property
    def experts(self) -> int:
        """Experts per layer."""
        return _number(self.modules[0], "num_experts")

    @property
    def chosen(self) -> int:
        """Experts chosen per row."""
        return _number(self.modules[0], "top_k")

    @contextmanager
    def within(self, router_pass: RouterPass) -> Iterator[None]:
        """Applies the pass's routes and statistics to the routers in the block."""
        self._pass = router_pass
        try:
            yield
        finally:
            self._pass = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _routed(self, number: int, router: nn.Module, inputs: Any, output: Any) -> Routed | None:
        router_pass = self._pass
        if router_pass is None:
            return None
        if not reports_choices(router, output):
            if router_pass.routes is None and router_pass.balance is None:
                return None
            raise unknown_router(router)
        logits, weights, choices = output
        if router_pass.routes is not None:
            recorded = router_pass.routes[:, number].to(choices.dtype)
            choices = torch.where(recorded == FREE, choices, recorded)
            weights = self._weights_of(router, output).weights(logits, choices).to(weights.dtype)
        if router_pass.uses is not None:
            logs = torch.log_softmax(logits.detach().float(), -1)
            router_pass.entropy[number] = -((logs.exp() * logs).sum(-1) * router_pass.uses).sum()
            router_pass.load[number] = tokens_of_experts(choices, router_pass.uses, logits.shape[-1])
        if router_pass.balance is not None:
            shares = self._weights_of(router, output).shares(logits)
            loss = (shares * router_pass.balance.slopes(choices, logits.shape[-1])).sum()
            router_pass.balance_loss[number] = loss.detach()
            weights = _AddLossGradient.apply(weights, loss)  # type: ignore[no-untyped-call]
        return logits, weights, choices

    def _weights_of(self, router: nn.Module, output: Routed) -> RouterWeights:
        kind = type(router)
        if kind not in self._scores:
            self._scores[kind] = router_weights_of(router, *output)
        return self._scores[kind]


def tokens_of_experts(choices: Tensor, uses: Tensor, experts: int) -> Tensor:
    """How many tokens each expert got, if each row stands for `uses` tokens. [rows, chosen], [rows] → [experts]"""
    found = torch.zeros(experts, device=choices.device)  # unlike `bincount`, this does not synchronise with the device
    return found.scatter_add_(0, choices.reshape(-1).long(), uses[:, None].expand_as(choices).reshape(-1))


class _AddLossGradient(torch.autograd.Function):
    """Returns the weights unchanged; the backward pass adds the gradient of the loss."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.dtype, loss.device
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor]:
        dtype, device = ctx.like
        return slopes[0], torch.ones((), dtype=dtype, device=device)


def routers_of(model: nn.Module) -> list[nn.Module]:
    """The modules that route rows to experts, in layer order."""
    return [module for module in model.modules() if _routes(module)]


def _routes(module: nn.Module) -> bool:
    return (
        hasattr(module, "top_k")
        and hasattr(module, "num_experts")
        and isinstance(module._parameters.get("weight"), Tensor)
    )


def reports_choices(router: nn.Module, output: Any) -> bool:
    """Whether the output is logits, weights and choices of the rows, in that order."""
    if not isinstance(output, tuple) or len(output) != 3 or not all(isinstance(each, Tensor) for each in output):
        return False
    logits, weights, choices = output
    if not (logits.is_floating_point() and weights.is_floating_point()) or choices.is_floating_point():
        return False
    rows, experts, chosen = len(logits), _number(router, "num_experts"), _number(router, "top_k")
    return [tuple(each.shape) for each in output] == [(rows, experts), (rows, chosen), (rows, chosen)]


def _number(router: nn.Module, name: str) -> int:
    value: Any = getattr(router, name)
    return int(value)


@dataclass(frozen=True)
class RouterWeights:
    """How a model family computes weights from logits."""

    scores: Callable[[Tensor], Tensor]
    normalised: bool
    scale: float

    def weights(self, logits: Tensor, choices: Tensor) -> Tensor:
        """The weights of the chosen experts, [rows, chosen]."""
        weights = self.scores(logits.float()).gather(1, choices)
        if self.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.scale

    def shares(self, logits: Tensor) -> Tensor:
        """Each expert's share of a row's scores, [rows, experts]; they sum to 1."""
        scores = self.scores(logits.float())
        return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def router_weights_of(router: nn.Module, logits: Tensor, weights: Tensor, choices: Tensor) -> RouterWeights:
    """Finds the formula that reproduces the router's own weights for its own choices."""
    scale = float(getattr(router, "routed_scaling_factor", 1.0))
    softmax = partial(torch.softmax, dim=-1)
    candidates = [
        RouterWeights(scores, normalised, scale) for scores in (softmax, torch.sigmoid) for normalised in (True, False)
    ]
    given = weights.detach().float()
    found = [float((candidate.weights(logits.detach(), choices) - given).abs().max()) for candidate in candidates]
    best = min(range(len(candidates)), key=found.__getitem__)
    rounding = 1e-5 if weights.dtype == torch.float32 else 2e-2
    if not found[best] < rounding * float(given.abs().max()):
        raise unknown_router(router)
    return candidates[best]


def unknown_router(router: nn.Module) -> UserError:
    return UserError(
        f"model: how {type(router).__name__} weighs its experts is not known: write rollout.router_replay=false and "
        "train.router_balance_loss=0"
    )
