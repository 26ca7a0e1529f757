"""Fits an `EngineSpec` to a real engine: which batches to time, and the parameters that fit best.

Batches are timed as the workload makes them: from one sequence to `max_running`, each with the context at which a random
token of the workload is sampled; and a few sequences near their maximum length, as at the end of a step. The contexts of
a batch differ on purpose: an engine may take as long for a short one as for the longest in the batch, and the fit then
finds what a token of context costs in such a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from roll.simulation.spec import EngineSpec
from roll.simulation.workload import Workload

DRAWS = 3
"""Batches per size."""
_GROUPS = 64
"""Groups from whose tokens the contexts are chosen."""


@dataclass(frozen=True)
class Timing:
    """A timed decoding step."""

    batch: int
    cached_tokens: float
    seconds: float


def batches_to_time(workload: Workload) -> list[list[int]]:
    """Batches, each as the context lengths of its sequences, in tokens."""
    most = workload.engine.max_running
    sizes = sorted({*(1 << power for power in range(most.bit_length())), most})
    chance = np.random.default_rng(workload.seed)
    usual = [_contexts(workload, size, chance) for size in sizes for _ in range(DRAWS)]
    longest = round(workload.prompts.mean_tokens) + workload.responses.max_tokens
    return [*usual, *([longest * 3 // 4] * size for size in sizes if size <= most // 4)]


def _contexts(workload: Workload, size: int, chance: np.random.Generator) -> list[int]:
    turns = [workload.episode(s).turns[0] for group in range(_GROUPS) for s in workload.samples_of(group)]
    lengths = np.array([turn.new_tokens for turn in turns])
    picked = chance.choice(len(turns), size, p=lengths / lengths.sum())
    return [turns[number].prompt_tokens + int(chance.integers(turns[number].new_tokens)) for number in picked]


def fitted(spec: EngineSpec, timings: Sequence[Timing], prefill_tokens_per_s: float) -> EngineSpec:
    """The spec with the timed speeds: no cost is below 0, and the sum of squared relative errors is minimal."""
    seconds = np.array([timing.seconds for timing in timings])
    rows = np.array([[1.0, timing.batch, timing.cached_tokens] for timing in timings]) / seconds[:, None]
    base_s, per_sequence_s, per_cached_token_s = _least_squares(rows)
    return replace(
        spec,
        base_s=base_s,
        per_sequence_s=per_sequence_s,
        per_cached_token_s=per_cached_token_s,
        prefill_tokens_per_s=prefill_tokens_per_s,
    )


def _least_squares(rows: NDArray[np.float64]) -> list[float]:
    """Costs with which every row gives nearly 1; negative ones are set to 0, the most negative first."""
    left = list(range(rows.shape[1]))
    while True:
        scales = np.linalg.norm(rows[:, left], axis=0)
        found = np.linalg.lstsq(rows[:, left] / scales, np.ones(len(rows)), rcond=None)[0]
        if found.min() >= 0:
            costs = dict(zip(left, found / scales, strict=True))
            return [float(costs.get(column, 0.0)) for column in range(rows.shape[1])]
        del left[int(found.argmin())]


def error_of(spec: EngineSpec, timings: Sequence[Timing]) -> float:
    """Mean relative error of the spec on the timings."""
    shares = [spec.step_s(t.batch, round(t.cached_tokens)) / t.seconds - 1 for t in timings]
    return float(np.abs(shares).mean())
