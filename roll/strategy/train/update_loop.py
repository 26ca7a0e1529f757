"""The updates of one step: the batch is split into mini-batches of whole groups, and the trainer goes through them for
one or several epochs."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from roll.config.errors import RunError, UserError
from roll.config.schema import TrainConfig
from roll.data.batch import Batch
from roll.data.remote_columns import Indices
from roll.strategy.train.base import NotFinite, UpdateStats
from roll.strategy.train.nonfinite import sample_names


def make_updates(batch: Batch, config: TrainConfig, lr: float, update: Callable[[Batch], UpdateStats]) -> UpdateStats:
    """Calls `update` on each mini-batch that has sampled tokens, `epochs_per_step` times over. Returns the stats of the
    whole step."""
    parts = [batch.select(part) for part in _by_groups(batch, config.updates_per_step)]
    parts = [part for part in parts if part.loss_mask.any()] * config.epochs_per_step
    if not parts:
        raise RunError("the batch has no sampled tokens to train on")
    return _joined([update(part) for part in parts], parts, batch, lr)


def _by_groups(batch: Batch, parts: int) -> list[Indices]:
    """Splits a batch into parts of whole groups, in order and as even as possible."""
    groups = list(dict.fromkeys(batch["group"].tolist()))
    pieces = np.array_split(np.array(groups), min(parts, len(groups)))
    return [np.flatnonzero(np.isin(batch["group"], piece)) for piece in pieces]


def _joined(done: list[UpdateStats], parts: list[Batch], batch: Batch, lr: float) -> UpdateStats:
    """The stats of all updates together. Loss and metrics are averaged, weighted by the updates' sampled tokens."""
    sampled = [int(part.loss_mask.sum()) for part in parts]
    share = [tokens / sum(sampled) for tokens in sampled]
    for other in done[1:]:
        if other.metrics.keys() != done[0].metrics.keys():
            names = " and ".join(", ".join(stats.metrics) for stats in (done[0], other))
            raise UserError(f"algorithm.loss: two updates of a step have other metrics ({names}): give the same in each")
    metrics = {n: sum(w * s.metrics[n] for w, s in zip(share, done, strict=True)) for n in done[0].metrics}
    if "rollout_logprob_diff_max" in metrics:
        metrics["rollout_logprob_diff_max"] = max(s.metrics["rollout_logprob_diff_max"] for s in done)
    return UpdateStats(
        loss=sum(w * s.loss for w, s in zip(share, done, strict=True)),
        grad_norm=math.nan if any(math.isnan(s.grad_norm) for s in done) else max(s.grad_norm for s in done),
        lr=lr,
        rows=sum(s.rows for s in done),
        tokens=batch.tokens,
        updates=len(done),
        skipped=sum(s.skipped for s in done),
        not_finite=sum((s.not_finite for s in done), start=NotFinite()),
        metrics=metrics,
        untrained=_untrained(done, parts),
    )


def _untrained(done: list[UpdateStats], parts: list[Batch]) -> tuple[str, ...]:
    """The samples that were in no applied update."""
    applied = {name for stats, part in zip(done, parts, strict=True) if not stats.skipped for name in sample_names(part)}
    return tuple(dict.fromkeys(name for part in parts for name in sample_names(part) if name not in applied))
