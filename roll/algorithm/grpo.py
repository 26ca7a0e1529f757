"""GRPO: a sample's advantage is its reward relative to its siblings'; the ratio to the proximal policy is clipped.

Shao et al., 2024, arXiv 2402.03300. The KL penalty against the initial model is off unless `kl_coef` is set.
"""

from __future__ import annotations

from roll.algorithm.advantages import group_relative
from roll.algorithm.streams import LossSpec
from roll.config.schema import AlgorithmConfig
from roll.data.batch import Batch


class GRPO:
    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config

    @property
    def needs_reference(self) -> bool:
        return self._config.kl_coef > 0

    @property
    def loss(self) -> LossSpec:
        config = self._config
        params = {
            "clip_low": config.clip_low,
            "clip_high": config.clip_high,
            "correction_cap": config.correction_cap if config.correction == "truncated" else None,
            "kl_coef": config.kl_coef,
        }
        return LossSpec("clipped_ratio", params, config.aggregation)

    def credit(self, batch: Batch) -> Batch:
        advantage = group_relative(batch["reward"], batch["group"], self._config.scale_by_std)
        return batch.with_columns(advantage=advantage)
