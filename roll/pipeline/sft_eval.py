"""SFT evaluation: how well a model predicts the assistant tokens of held-out conversations."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from roll.data.batch import Batch
from roll.pipeline.roles import TrainRoles
from roll.workers.train import TrainWorker


@dataclass(frozen=True)
class SFTEval:
    """Means over the assistants' tokens."""

    loss: float
    """-log p."""
    token_probability: float
    """p: how often a token sampled at temperature 1 would be the right one."""
    tokens: int
    step: int | None = None
    """Training steps behind the weights; None if no run made them."""
    model: str = ""

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"pipeline": "sft", **asdict(self), "perplexity": self.perplexity}

    def __str__(self) -> str:
        return (
            f"held-out loss {self.loss:.4f} (perplexity {self.perplexity:.3f}) over {self.tokens} tokens of answers, "
            f"each of which has a probability of {self.token_probability:.3f} in the mean"
        )


async def measure(roles: TrainRoles, held_out: Batch, samples: int) -> SFTEval:
    """Evaluates `samples` held-out samples, evenly spaced if there are more; 0 means all."""
    count = min(samples or len(held_out), len(held_out))
    chosen = np.unique(np.linspace(0, len(held_out) - 1, count).round().astype(np.int64))
    batch = held_out.select(chosen)
    batch = batch.with_columns(proximal=await roles.actor.call(TrainWorker.log_probs, batch))
    batch = await roles.executor.fetch(batch)
    log_probs = batch["proximal"][batch.loss_mask].astype(np.float64)
    return SFTEval(-float(log_probs.mean()), float(np.exp(log_probs).mean()), len(log_probs))
