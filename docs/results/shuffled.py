"""The control of the four domains: a run whose rewards belong to other samples."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import numpy as np

from roll.algorithm import Algorithm


class Shuffled(Algorithm):
    """Assigns the rewards of a step to random samples of the same domain."""

    def scores(self, batch: Any) -> Any:
        scores = super().scores(batch)
        draw = np.random.default_rng(crc32(scores.tobytes()))
        for domain in np.unique(batch["domain"]):
            here = np.flatnonzero(batch["domain"] == domain)
            scores[here] = scores[draw.permutation(here)]
        return scores
