"""The control: what a run learns when its rewards are right in number and wrong in place."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import numpy as np

from roll.algorithm import Algorithm


class Shuffled(Algorithm):
    """Every domain's rewards of a step, dealt out anew among its samples."""

    def scores(self, batch: Any) -> Any:
        scores = super().scores(batch)
        draw = np.random.default_rng(crc32(scores.tobytes()))
        for domain in np.unique(batch["domain"]):
            here = np.flatnonzero(batch["domain"] == domain)
            scores[here] = scores[draw.permutation(here)]
        return scores
