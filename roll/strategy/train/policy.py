"""Log-probs and updates of a policy, on one device or over several ranks: packed prefix trees, micro-batches limited by
packed tokens, fp32 master weights.

Invariants: the gradient is that of the loss over the whole batch, for any number of ranks and micro-batches
(`token_weights` fixes every token's weight before the batch is split); parameters are updated in place.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from roll.algorithm.correction import Mismatch
from roll.algorithm.credit import token_credit
from roll.algorithm.loss_inputs import LossInputs, LossSpec, TokenLoss, token_weights
from roll.algorithm.losses import resolve_loss
from roll.config.schema import TrainConfig
from roll.data.batch import Batch
from roll.data.remote_columns import Array
from roll.data.tokenlog import FloatArray
from roll.model.lora import Adapters
from roll.strategy.train.base import NotFinite, UpdateStats
from roll.strategy.train.forward import ForwardRunner
from roll.strategy.train.logprobs import token_log_probs
from roll.strategy.train.microbatch import MicroBatch
from roll.strategy.train.mixture import Mixture, RouterStats
from roll.strategy.train.nonfinite import NonFiniteTracker
from roll.strategy.train.optimizer import MasterAdamW, learning_rate
from roll.strategy.train.update_loop import make_updates
from roll.strategy.train.work_split import RankShare, SplitRows, WorkSplit


class PolicyTrainer:
    """The computation of a training strategy. The strategy that inherits from it decides where parameters are stored and
    how they are saved."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainConfig,
        split: WorkSplit,
        runner: ForwardRunner,
        *,
        trainable: bool,
        adapters: Adapters | None,
    ) -> None:
        self.model = model
        self._adapters = adapters
        self._config = config
        self._split = split
        if adapters is None:
            model.requires_grad_(trainable)
        self._optimizer = MasterAdamW(model, config) if trainable else None
        self._runner = runner
        self._mixture = Mixture(model, config, adapted=adapters is not None) if trainable else None

    @torch.no_grad()
    def log_probs(self, batch: Batch, *, base: bool = False) -> FloatArray:
        """Log-probs of the sampled tokens under the current weights, 0 elsewhere: one value per token. With `base`, they
        are computed under the base model's weights, without the adapters."""
        assert not base or self._adapters is not None, "a model without adapters is no longer its base"
        self._runner.prepare(batch)
        with self._adapters.off() if base and self._adapters is not None else nullcontext():
            result = self._runner.attempt(batch, lambda: self._log_probs(batch, base=base))
        if self._optimizer is None:
            self._runner.warn_of_retries()  # a frozen model makes no update whose stats would report the retries
        return result

    def _log_probs(self, batch: Batch, *, base: bool) -> FloatArray:
        share = self._split.share(batch)
        own = np.zeros(share.batch.tokens, np.float32)
        results = [
            (micro.where, self._current(micro, replays=not base)[0], real) for micro, real in self._micros(share.batch)
        ]
        for where, current, real in results:  # launch all forward passes before the first copy waits for the device
            if real:
                own[where] = current.cpu().numpy()
        return whole_column(self._split, batch, share, own)

    def update(self, batch: Batch, loss: LossSpec, step: int) -> UpdateStats:
        """Makes all updates of one step on the batch."""
        if "advantage" not in batch:
            raise ValueError("the batch has no column 'advantage': credit it before an update")
        if self._config.several_updates and "proximal" not in batch:
            batch = batch.with_columns(proximal=self.log_probs(batch))
        batch = batch.with_columns(advantages=token_credit(batch, loss.credit).advantages)
        lr = learning_rate(self._config, step)
        split, adapters = self._split, self._adapters
        with adapters.dropping(step, split.device, split.noise) if adapters is not None else nullcontext():
            stats = make_updates(batch, self._config, lr, lambda part: self._update_once(part, loss, step))
        return stats.with_memory(self._runner.limit_rows, self._runner.take_retries())

    def _update_once(self, batch: Batch, spec: LossSpec, step: int) -> UpdateStats:
        optimizer = self._optimizer
        assert optimizer is not None, "a frozen model cannot be updated"
        loss_of, share = resolve_loss(spec), self._split.share(batch)
        self._runner.prepare(batch)
        work = partial(self._gradients, batch, share, spec, loss_of)
        totals, tracker, routers = self._runner.attempt(batch, work, undo=optimizer.zero_grad)
        done = optimizer.step(step, totals.loss)
        total, metrics = totals.result()
        if routers is not None and self._mixture is not None:
            metrics |= routers.metrics()
            if done.applied:
                self._mixture.end_update(routers)
        if share.imbalance is not None:
            metrics["imbalance"] = share.imbalance
        not_finite = (
            NotFinite()
            if done.applied
            else NotFinite(nonfinite_samples(self._split, tracker, share.batch), done.nonfinite)
        )
        norm = done.norm if done.applied else math.nan
        return UpdateStats(total, norm, 0.0, totals.rows, batch.tokens, 1, int(not done.applied), not_finite, metrics)

    def _gradients(
        self, batch: Batch, share: RankShare, spec: LossSpec, loss_of: Callable[[LossInputs], TokenLoss]
    ) -> tuple[UpdateTotals, NonFiniteTracker, RouterStats | None]:
        """Accumulates the gradients of one update. Returns the summed loss and metrics, the tracker of non-finite
        samples, and the router statistics of an MoE model."""
        weights = token_weights(batch, spec.aggregation, spec.length)[share.tokens]
        own = share.batch
        columns = {name: own[name] for name in ("behaviour", "proximal", "ref", "advantages") if name in own}
        totals, tracker = UpdateTotals(), NonFiniteTracker()
        routers = None if self._mixture is None else self._mixture.stats(batch, self._split.device)
        for micro, real in self._micros(own):
            stats = routers if real else None
            current, entropy = self._current(micro, entropy_gradient=spec.wants_entropy, stats=stats)
            if not real:
                (current.sum() * 0.0).backward()  # type: ignore[no-untyped-call]
                continue
            inputs = loss_inputs(micro, current, entropy, columns)
            token_loss = loss_of(inputs)
            weighted = (token_loss.values * micro.column(weights)).sum()
            current.retain_grad()
            weighted.backward()  # type: ignore[no-untyped-call]
            totals.add(weighted.detach(), inputs, token_loss, spec)
            tracker.add(micro, token_loss.values, current.grad)
            totals.rows += micro.rows
        if self._split.ranks > 1:
            totals.join(self._split)
        if routers is not None:
            routers.join(self._split)
        return totals, tracker, routers

    def _micros(self, batch: Batch) -> Iterator[tuple[MicroBatch, bool]]:
        return self._split.in_lockstep(self._runner.over(batch, routers=self._mixture is not None))

    def _current(
        self,
        micro: MicroBatch,
        *,
        entropy_gradient: bool = False,
        replays: bool = True,
        stats: RouterStats | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the sampled tokens. For an MoE model, router statistics are added to `stats`, and
        with `replays` the routers choose the experts that the engine recorded while sampling."""

        def run() -> tuple[Tensor, Tensor]:
            rows = self._split.rows(micro)
            hidden, predictions = self._hidden(rows, replays, stats), rows.micro.predictions
            current, entropy = token_log_probs(self.model, hidden, predictions, entropy_gradient=entropy_gradient)
            return rows.tokens(current), rows.tokens(entropy)

        return self._split.forward(run)

    def _hidden(self, rows: SplitRows, replays: bool, stats: RouterStats | None) -> Tensor:
        if self._mixture is None or (routing := self._mixture.router_pass(rows, replays=replays, stats=stats)) is None:
            return self._runner.hidden(rows.micro)
        hidden = self._runner.hidden(rows.micro, self._mixture.within(routing))
        if stats is not None:
            stats.add(routing)
        return hidden


def whole_column(split: WorkSplit, batch: Batch, share: RankShare, own: FloatArray) -> FloatArray:
    """A token column of the whole batch, summed from the parts that the ranks computed."""
    if split.ranks == 1:
        return own
    result = np.zeros(batch.tokens, np.float32)
    result[share.tokens] = own
    return np.asarray(split.sum(torch.from_numpy(result).to(split.device)).cpu().numpy(), np.float32)


def nonfinite_samples(split: WorkSplit, tracker: NonFiniteTracker, own: Batch) -> tuple[str, ...]:
    """The samples of all ranks that made an update non-finite."""
    return tuple(name for names in split.gathered(tracker.samples(own)) for name in names)


class UpdateTotals:
    """Sums over micro-batches. They stay on the device: copying one to the host would wait for all work launched so
    far."""

    def __init__(self) -> None:
        self.loss: Tensor = torch.zeros(())
        self._sums: dict[str, Tensor | float] = defaultdict(float)
        self._mismatch = Mismatch()
        self.rows = 0
        """Packed tokens computed; a shared prefix counts once."""

    def add(self, loss: Tensor, inputs: LossInputs, token_loss: TokenLoss, spec: LossSpec) -> None:
        assert inputs.entropy is not None
        self.loss = self.loss.to(loss.device) + loss
        for name, values in {**token_loss.metrics, "entropy": inputs.entropy}.items():
            self._sums[name] += values.detach().sum()
        self._mismatch.add(inputs, spec.correction)

    def join(self, split: WorkSplit) -> None:
        """Adds the sums of the other ranks. A rank may have had no micro-batch."""
        names = sorted(set().union(*split.gathered(set(self._sums))))
        sums = [
            self.loss.double(),
            torch.tensor(float(self.rows), dtype=torch.float64),
            *(torch.as_tensor(self._sums[name], dtype=torch.float64) for name in names),
        ]
        joined = split.sum(torch.stack([value.to(split.device) for value in sums]))
        self.loss, self.rows = joined[0], int(joined[1])
        self._sums = defaultdict(float, zip(names, joined[2:], strict=True))
        self._mismatch.join(split)

    def result(self) -> tuple[float, dict[str, float]]:
        """The loss, and the metrics as means over the sampled tokens."""
        metrics = {name: float(value) / self._mismatch.tokens for name, value in self._sums.items()}
        return float(self.loss), {**metrics, **self._mismatch.metrics()}


def loss_inputs(micro: MicroBatch, current: Tensor, entropy: Tensor, columns: Mapping[str, Array]) -> LossInputs:
    known = {name: micro.column(values) for name, values in columns.items()}
    return LossInputs(
        current=current,
        proximal=known.get("proximal", current.detach()),
        behaviour=known["behaviour"],
        advantage=known["advantages"],
        sample=micro.sample,
        turn=micro.turn,
        ref=known.get("ref"),
        entropy=entropy,
    )
