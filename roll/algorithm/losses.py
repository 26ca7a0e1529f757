"""Losses: pure functions from per-token inputs to a loss per token. They do not depend on how the batch is split.

`resolve_loss` builds the complete loss of a spec:

    correction × policy loss + kl_coef × KL(current ‖ ref) - entropy_coef × entropy
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from roll.algorithm.correction import correction_weight
from roll.algorithm.kl import bounded_exp, kl_estimate
from roll.algorithm.loss_inputs import Level, LossInputs, LossSpec, TokenLoss, mean_within, sum_within
from roll.algorithm.metric_names import OF_ALGORITHM, OF_TRAINER, check_unique
from roll.config.errors import UserError
from roll.config.suggest import did_you_mean
from roll.config.user_code import load_user_code

Loss = Callable[..., TokenLoss]


def clipped(
    inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None, ratio: Level = "token"
) -> TokenLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = current / proximal (Schulman et al., 2017, arXiv 1707.06347).

    `dual_clip` bounds the loss by -dual_clip · A where A is negative (Ye et al., 2019, arXiv 1912.09729).
    """
    r = policy_ratio(inputs, ratio)
    free, bounded = r * inputs.advantage, r.clamp(1 - clip_low, 1 + clip_high) * inputs.advantage
    gain = torch.minimum(free, bounded)
    if dual_clip is not None:
        gain = torch.where(inputs.advantage < 0, torch.maximum(gain, dual_clip * inputs.advantage), gain)
    return TokenLoss(-gain, {"clip_frac": (gain != free).float()})


def cispo(inputs: LossInputs, *, clip_low: float, clip_high: float, ratio: Level = "token") -> TokenLoss:
    """-clip(r, 1 - low, 1 + high) A log current, with the clipped ratio as a constant (MiniMax, 2025, arXiv 2506.13585).

    The gradient of a clipped token is bounded, not zero.
    """
    r = policy_ratio(inputs, ratio).detach()
    weight = r.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(-weight * inputs.advantage * inputs.current, {"clip_frac": (weight != r).float()})


def topr(inputs: LossInputs) -> TokenLoss:
    """-w A log current (Le Roux et al., 2025, arXiv 2503.14286): w is 1 where A ≥ 0, else the likelihood ratio of the
    whole sample to the sampler's, at most 1. Negative samples that have become unlikely are not pushed down further."""
    log_ratio = sum_within((inputs.current - inputs.behaviour).detach(), inputs.sample)
    taper = torch.exp(log_ratio.clamp(max=0.0))
    weight = torch.where(inputs.advantage >= 0, torch.ones_like(taper), taper)
    return TokenLoss(-weight * inputs.advantage * inputs.current, {"taper": weight})


def sapo(inputs: LossInputs, *, tau_positive: float, tau_negative: float, ratio: Level = "token") -> TokenLoss:
    """-(4 / τ) sigmoid(τ (r - 1)) A (Qwen, 2025, arXiv 2511.20347): a soft gate instead of the clip, whose slope is 1 at
    r = 1 and falls on both sides; τ is `tau_positive` where A > 0, else `tau_negative`."""
    r = policy_ratio(inputs, ratio)
    tau = torch.full_like(r, tau_negative).masked_fill(inputs.advantage > 0, tau_positive)
    gate = torch.sigmoid(tau * (r - 1))
    return TokenLoss(-4 / tau * gate * inputs.advantage, {"gate": (4 * gate * (1 - gate)).detach()})


def reinforce(inputs: LossInputs) -> TokenLoss:
    """-A log current (Williams, 1992)."""
    return TokenLoss(-inputs.advantage * inputs.current)


def nll(inputs: LossInputs) -> TokenLoss:
    """-log current: imitation."""
    return TokenLoss(-inputs.current)


LOSSES: dict[str, Loss] = {
    "clipped": clipped,
    "cispo": cispo,
    "topr": topr,
    "sapo": sapo,
    "reinforce": reinforce,
    "nll": nll,
}


def policy_ratio(inputs: LossInputs, level: Level) -> Tensor:
    """current / proximal of each token, or the geometric mean over its turn or its sample (Zheng et al., 2025, GSPO,
    arXiv 2507.18071), whose gradient flows to all of the segment's tokens."""
    log_ratio, segments = inputs.current - inputs.proximal, inputs.segments(level)
    return bounded_exp(log_ratio if segments is None else mean_within(log_ratio, segments))


def resolve_loss(spec: LossSpec) -> Callable[[LossInputs], TokenLoss]:
    """The complete loss of a spec."""
    policy: Loss = LOSSES.get(spec.name) or _users_loss(spec.name, spec.params, spec.root)

    def loss_of(inputs: LossInputs) -> TokenLoss:
        token_loss = policy(inputs, **spec.params)
        values, metrics = token_loss.values, dict(token_loss.metrics)
        if spec.correction is not None:
            weight = correction_weight(inputs, spec.correction)
            values = values * weight
            metrics["is_weight_mean"] = weight
        if inputs.ref is not None:
            kl = kl_estimate(inputs.current, inputs.ref, spec.kl_estimator)
            metrics["kl"] = kl.detach()
            values = values + spec.kl_coef * kl if spec.kl_coef > 0 else values
        elif spec.kl_coef > 0:
            raise ValueError("a KL penalty needs the reference's log-probs: the batch has no column 'ref'")
        if spec.entropy_coef > 0:
            assert inputs.entropy is not None, "the spec says that entropies are wanted"
            values = values - spec.entropy_coef * inputs.entropy
        return TokenLoss(values, metrics)

    return loss_of


def _users_loss(name: str, options: Mapping[str, Any], root: str) -> Loss:
    """A user's loss, checked for what every loss must return: one value per token, with a gradient, and metrics with
    names of its own."""
    users = load_user_code(name, what="algorithm.loss", known=LOSSES, root=root)
    _check_options(name, users, options)

    def loss_of(inputs: LossInputs, **given: Any) -> TokenLoss:
        result = users(inputs, **given)
        if not isinstance(result, TokenLoss):
            kind = type(result).__name__
            raise UserError(f"algorithm.loss {name!r} gave a {kind}: return roll.algorithm.TokenLoss(values)")
        _check_values(f"algorithm.loss {name!r}: the loss", result.values, inputs)
        for metric, values in result.metrics.items():
            _check_values(f"algorithm.loss {name!r}: the metric {metric!r}", values, inputs)
        check_unique(result.metrics, OF_TRAINER | OF_ALGORITHM, f"algorithm.loss {name!r}")
        if inputs.current.requires_grad and not result.values.requires_grad:
            raise UserError(f"algorithm.loss {name!r} has no gradient: compute its values from inputs.current")
        return result

    return loss_of


def _check_values(what: str, values: Any, inputs: LossInputs) -> None:
    """Raises unless there is one value per token: a scalar would be broadcast to all tokens."""
    if not isinstance(values, Tensor) or values.shape != inputs.current.shape:
        got = f"has shape {list(values.shape)}" if isinstance(values, Tensor) else f"is a {type(values).__name__}"
        raise UserError(
            f"{what} {got}, but there are {len(inputs.current)} tokens: give a tensor with a value for each, no sum or "
            "mean; that comes after (algorithm.aggregation)"
        )


def _check_options(name: str, users: Any, options: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(users)
    except (TypeError, ValueError):  # some callables written in C have none
        return
    try:
        signature.bind(None, **options)
    except TypeError as error:
        known = list(signature.parameters)[1:]
        unknown = next((option for option in options if option not in known), "")
        raise UserError(
            f"algorithm.loss_options: {error} (algorithm.loss {name!r} takes: {', '.join(known) or 'none'})"
            f"{did_you_mean(unknown, known)}"
        ) from error
