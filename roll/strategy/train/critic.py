"""Trains a critic: the micro-batches of the policy, with one predicted value per token instead of logits.

Invariants: an update's gradient is that of the mean over its sampled tokens, for any micro-batches; a value is predicted
from the state before its token, so it does not depend on the token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from roll.algorithm.credit import token_credit
from roll.algorithm.loss_inputs import CreditSpec, token_weights
from roll.algorithm.value import value_loss
from roll.config.schema import TrainConfig
from roll.data.batch import Batch
from roll.data.tokenlog import FloatArray
from roll.model.loading import quiet
from roll.model.value_head import ValueModel
from roll.strategy.offload import Residency, TensorOffloader
from roll.strategy.train.base import NotFinite, UpdateStats
from roll.strategy.train.forward import ForwardRunner
from roll.strategy.train.microbatch import MicroBatch
from roll.strategy.train.nonfinite import NonFiniteTracker
from roll.strategy.train.optimizer import MasterAdamW, learning_rate
from roll.strategy.train.policy import nonfinite_samples, whole_column
from roll.strategy.train.saved_state import OPTIMIZER_FILE, load_state
from roll.strategy.train.update_loop import make_updates
from roll.strategy.train.work_split import OneProcess, RankShare, WorkSplit


class CriticTrainer:
    """The computation of a critic strategy. The strategy that inherits from it decides where parameters are stored and
    how they are saved."""

    def __init__(
        self, model: ValueModel, config: TrainConfig, value_clip: float | None, split: WorkSplit, runner: ForwardRunner
    ) -> None:
        self.model = model
        self._config = config
        self._clip = value_clip
        self._split = split
        self._runner = runner
        self._optimizer = MasterAdamW(self.model, config)

    @torch.no_grad()
    def values(self, batch: Batch) -> FloatArray:
        """Predicted values of the state before each sampled token; 0 elsewhere."""
        self._runner.prepare(batch)
        return self._runner.attempt(batch, lambda: self._all_values(batch))

    def _all_values(self, batch: Batch) -> FloatArray:
        share = self._split.share(batch)
        own = np.zeros(share.batch.tokens, np.float32)
        results = [(micro.where, self._values(micro), real) for micro, real in self._micros(share.batch)]
        for where, values, real in results:
            if real:
                own[where] = values.cpu().numpy()
        return whole_column(self._split, batch, share, own)

    def update(self, batch: Batch, credit: CreditSpec, step: int) -> UpdateStats:
        """Trains on the batch's returns, in as many updates as the actor makes. The batch's column `values` has the
        values predicted before the step. If rewards contain a KL penalty and the step has several updates, the batch
        needs the column `proximal`, from which the actor's penalties are computed as well."""
        if credit.kl_coef > 0 and self._config.several_updates and "proximal" not in batch:
            raise ValueError("the batch has no column 'proximal': the critic would see other rewards than the actor")
        returns = token_credit(batch, credit).returns
        assert returns is not None, "returns are credited where there is a critic"
        batch, lr = batch.with_columns(returns=returns), learning_rate(self._config, step)
        stats = make_updates(batch, self._config, lr, lambda part: self._update_once(part, step))
        stats = stats.with_memory(self._runner.limit_rows, self._runner.take_retries())
        return stats.with_metrics({"explained": _explained(batch)})

    def _update_once(self, batch: Batch, step: int) -> UpdateStats:
        share = self._split.share(batch)
        self._runner.prepare(batch)
        work = partial(self._gradients, batch, share)
        total, tracker, rows = self._runner.attempt(batch, work, undo=self._optimizer.zero_grad)
        done = self._optimizer.step(step, total)
        norm = done.norm if done.applied else math.nan
        not_finite = (
            NotFinite()
            if done.applied
            else NotFinite(nonfinite_samples(self._split, tracker, share.batch), done.nonfinite)
        )
        metrics = {} if share.imbalance is None else {"imbalance": share.imbalance}
        return UpdateStats(float(total), norm, 0.0, rows, batch.tokens, 1, int(not done.applied), not_finite, metrics)

    def _gradients(self, batch: Batch, share: RankShare) -> tuple[Tensor, NonFiniteTracker, int]:
        """Accumulates the gradients of an update. Returns its loss, the tracker of non-finite samples, and the number of
        packed tokens computed."""
        own, weights = share.batch, token_weights(batch, "token_mean")[share.tokens]
        columns = {"before": own["values"], "returns": own["returns"], "weights": weights}
        total = torch.zeros((), device=self._split.device)
        tracker, rows = NonFiniteTracker(), 0
        for micro, real in self._micros(own):
            values = self._values(micro)
            if not real:
                (values.sum() * 0.0).backward()  # type: ignore[no-untyped-call]
                continue
            known = {name: micro.column(column) for name, column in columns.items()}
            losses = value_loss(values, known["before"], known["returns"], self._clip)
            loss = (losses * known["weights"]).sum()
            values.retain_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            tracker.add(micro, losses, values.grad)
            total, rows = total + loss.detach(), rows + micro.rows
        if self._split.ranks > 1:
            total, rows = joined_sums(self._split, total, rows)
        return total, tracker, rows

    def _micros(self, batch: Batch) -> Iterator[tuple[MicroBatch, bool]]:
        return self._split.in_lockstep(self._runner.over(batch))

    def _values(self, micro: MicroBatch) -> Tensor:
        """[tokens]"""

        def run() -> Tensor:
            rows = self._split.rows(micro)
            hidden, predictions = self._runner.hidden(rows.micro), rows.micro.predictions
            distinct = self.model.read(hidden.index_select(0, predictions.rows))
            return rows.tokens(distinct[predictions.sources[predictions.pair_of]])

        return self._split.forward(run)


class CriticStrategy(CriticTrainer):
    """A critic in one process on one device."""

    def __init__(self, model: PreTrainedModel, config: TrainConfig, value_clip: float | None) -> None:
        model.requires_grad_(True)
        super().__init__(ValueModel(model), config, value_clip, OneProcess(model.device), ForwardRunner(model, config))
        self._offloader = TensorOffloader(model.device)

    def set_residency(self, level: Residency) -> None:
        self._offloader.set_residency(level, dict(self.model.named_parameters()), self._optimizer.tensors())

    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        with quiet():
            self.model.save(folder)
        self._optimizer.save(folder / OPTIMIZER_FILE)
        self._runner.save(folder)

    def load(self, folder: Path) -> None:
        load_state(folder, self._optimizer, lambda parameters: self.model.load(folder) if parameters else None)
        self._runner.load(folder)

    def saved(self) -> dict[str, str]:
        return {}

    def close(self) -> None:
        """There is nothing to free: all tensors belong to this process."""


def joined_sums(split: WorkSplit, total: Tensor, rows: int) -> tuple[Tensor, int]:
    """A loss and a number of packed tokens, summed over all ranks."""
    both = torch.stack([total.double(), torch.tensor(float(rows), dtype=torch.float64, device=split.device)])
    loss, count = split.sum(both)
    return loss, int(count)


def _explained(batch: Batch) -> float:
    """The share of the returns' variance that the values predicted before the step explain."""
    values, returns = (batch[name][batch.loss_mask].astype(np.float64) for name in ("values", "returns"))
    variance = float(np.var(returns)) if len(returns) else 0.0
    return 1 - float(np.mean((values - returns) ** 2)) / variance if variance > 0 else 0.0
