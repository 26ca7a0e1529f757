"""An algorithm that is told which rewards there were, but not whose they were."""

from __future__ import annotations

import numpy as np

from roll.algorithm import Algorithm
from roll.algorithm.reward_shaping import Floats
from roll.data.batch import Batch


class Shuffled(Algorithm):
    def scores(self, batch: Batch) -> Floats:
        return np.random.default_rng(len(batch)).permutation(super().scores(batch))
