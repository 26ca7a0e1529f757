"""Off-policy correction: how much the trainer's log-probs differ from the sampler's, and what is done about it.

Sampler and trainer differ where weights are older, and a little even where they are not: other kernels, other rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from roll.algorithm.kl import bounded_exp
from roll.algorithm.streams import CorrectionSpec, Streams, sum_within


def correction_weight(streams: Streams, spec: CorrectionSpec) -> Tensor:
    """proximal / behaviour of each token, or the product over its turn or sample: cut at the cap (truncated importance
    sampling), or 0 outside [low, cap] (masked)."""
    log_ratio, segments = streams.proximal - streams.behaviour, streams.segments(spec.level)
    weight = bounded_exp(log_ratio if segments is None else sum_within(log_ratio, segments))
    if spec.mode == "truncated":
        return weight.clamp(max=spec.cap)
    return torch.where((weight >= spec.low) & (weight <= spec.cap), weight, torch.zeros_like(weight))


@dataclass
class Mismatch:
    """Statistics of proximal - behaviour over all sampled tokens of a step, gathered micro-batch by micro-batch."""

    tokens: int = 0
    largest: float = 0.0
    cut: float = 0.0
    _sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("size", "k3", "weight", "square"), 0.0))

    @torch.no_grad()
    def add(self, streams: Streams, correction: CorrectionSpec | None) -> None:
        gap = streams.proximal - streams.behaviour
        weight = bounded_exp(gap)
        self.tokens += len(gap)
        self.largest = max(self.largest, float(gap.abs().max()) if len(gap) else 0.0)
        for name, values in (
            ("size", gap.abs()),
            ("k3", weight - gap - 1),
            ("weight", weight),
            ("square", weight.double() ** 2),
        ):
            self._sums[name] += float(values.double().sum())
        if correction is not None:
            segments = streams.segments(correction.level)
            whole = weight if segments is None else bounded_exp(sum_within(gap, segments))
            self.cut += float((correction_weight(streams, correction) != whole).sum())

    def metrics(self) -> dict[str, float]:
        """Mean and largest |gap|, KL estimate k3, effective sample size as a share, and the share of tokens whose
        weight was cut."""
        tokens = max(self.tokens, 1)
        square = self._sums["square"]
        return {
            "mismatch": self._sums["size"] / tokens,
            "mismatch_max": self.largest,
            "mismatch_k3": self._sums["k3"] / tokens,
            "mismatch_ess": self._sums["weight"] ** 2 / (tokens * square) if square else 1.0,
            "correction_cut": self.cut / tokens,
        }
