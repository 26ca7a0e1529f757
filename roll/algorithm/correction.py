"""Off-policy correction: measures how the trainer's log-probs differ from the sampler's, and computes importance weights.

Sampler and trainer differ if the sampler's weights are older, and slightly even if they are not, because kernels and
rounding differ.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from roll.algorithm.kl import bounded_exp
from roll.algorithm.loss_inputs import CorrectionSpec, LossInputs, sum_within


def correction_weight(inputs: LossInputs, spec: CorrectionSpec) -> Tensor:
    """The importance weight proximal / behaviour of each token, or the product over its turn or sample: capped (truncated
    importance sampling), or 0 outside [low, cap] (masked)."""
    log_ratio, segments = inputs.proximal - inputs.behaviour, inputs.segments(spec.level)
    weight = bounded_exp(log_ratio if segments is None else sum_within(log_ratio, segments))
    if spec.mode == "truncated":
        return weight.clamp(max=spec.cap)
    return torch.where((weight >= spec.low) & (weight <= spec.cap), weight, torch.zeros_like(weight))


T = TypeVar("T")


class RankReducer(Protocol):
    """Sums and gathers over the ranks of a trainer."""

    @property
    def device(self) -> torch.device: ...

    def sum(self, tensor: Tensor) -> Tensor: ...

    def gathered(self, value: T) -> list[T]: ...


@dataclass
class Mismatch:
    """Statistics of proximal - behaviour over all sampled tokens of a step, accumulated per micro-batch.

    Sums stay on the device until `metrics` or `join` is called.
    """

    tokens: int = 0
    _largest: Tensor | None = None
    _sums: dict[str, Tensor | float] = field(default_factory=lambda: defaultdict(float))

    @torch.no_grad()
    def add(self, inputs: LossInputs, correction: CorrectionSpec | None) -> None:
        if not len(inputs.current):
            return
        gap = inputs.proximal - inputs.behaviour
        size, weight = gap.abs(), bounded_exp(gap)
        self.tokens += len(gap)
        self._largest = size.max() if self._largest is None else torch.maximum(self._largest, size.max())
        cut = torch.zeros_like(gap)
        if correction is not None:
            segments = inputs.segments(correction.level)
            whole = weight if segments is None else bounded_exp(sum_within(gap, segments))
            cut = (correction_weight(inputs, correction) != whole).to(gap.dtype)
        terms = {"size": size, "k3": weight - gap - 1, "weight": weight, "square": weight.double() ** 2, "cut": cut}
        for name, values in terms.items():
            self._sums[name] += values.double().sum()

    def join(self, ranks: RankReducer) -> None:
        """Adds the statistics of the other ranks of a trainer."""
        names = ("size", "k3", "weight", "square", "cut")
        values = [float(self.tokens), *(float(self._sums[name]) for name in names)]
        tokens, *sums = ranks.sum(torch.tensor(values, dtype=torch.float64, device=ranks.device)).tolist()
        self.tokens, self._sums = int(tokens), defaultdict(float, zip(names, sums, strict=True))
        largest = [
            value
            for value in ranks.gathered(None if self._largest is None else float(self._largest))
            if value is not None
        ]
        self._largest = torch.tensor(max(largest)) if largest else None

    def metrics(self) -> dict[str, float]:
        """Mean and largest |gap|, KL estimate k3, effective sample size as a share, and the share of tokens whose weight
        was capped or masked."""
        tokens, sums = max(self.tokens, 1), {name: float(value) for name, value in self._sums.items()}
        square = sums.get("square", 0.0)
        return {
            "rollout_logprob_diff": sums.get("size", 0.0) / tokens,
            "rollout_logprob_diff_max": 0.0 if self._largest is None else float(self._largest),
            "rollout_kl": sums.get("k3", 0.0) / tokens,
            "is_ess": sums["weight"] ** 2 / (tokens * square) if square else 1.0,
            "is_weight_clip_frac": sums.get("cut", 0.0) / tokens,
        }
