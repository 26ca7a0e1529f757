"""The critic's loss and its derivative by each value."""

from __future__ import annotations

from collections.abc import Sequence

from reference.losses import clip
from reference.samples import RefSample, Rows, trained_tokens


def critic_loss(samples: Sequence[RefSample], values: Rows, returns: Rows, value_clip: float | None) -> float:
    """The mean over trained tokens of 0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2); 0 of an empty step.

    The clipping is of OpenAI's baselines (arXiv 2005.12729, section 3); V_old is the tokens' `value`. Without c it is
    0.5 (V - R)^2.
    """
    costs = []
    for i, t in trained_tokens(samples):
        value, target, old = values[i][t], returns[i][t], samples[i].response_tokens[t].value
        cost = (value - target) ** 2
        if value_clip is not None:
            cost = max(cost, (clip(value, old - value_clip, old + value_clip) - target) ** 2)
        costs.append(0.5 * cost)
    return sum(costs) / len(costs) if costs else 0.0


def critic_gradient(samples: Sequence[RefSample], values: Rows, returns: Rows, value_clip: float | None) -> Rows:
    """d critic_loss / d V: (V - R) / N, and 0 where V is beyond the clip and the clipped error is the larger."""
    gradient = [[0.0] * len(sample.response_tokens) for sample in samples]
    count = len(list(trained_tokens(samples)))
    for i, t in trained_tokens(samples):
        value, target, old = values[i][t], returns[i][t], samples[i].response_tokens[t].value
        slope = value - target
        if value_clip is not None and abs(value - old) > value_clip:
            held = clip(value, old - value_clip, old + value_clip)
            if (held - target) ** 2 > (value - target) ** 2:
                slope = 0.0
        gradient[i][t] = slope / count
    return gradient
