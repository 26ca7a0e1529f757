"""Training over many devices: FSDP2 shards, prefix trees balanced over the ranks, one gradient.

What always holds: the gradient is that of the whole batch's loss, whatever the ranks and micro-batches. Every rank has
the whole batch and computes every token's weight from it; each trains on its own samples, and gradients are summed. All
ranks make the same passes: one that has fewer micro-batches makes passes of no weight beside the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from roll.algorithm.credit import token_credit
from roll.algorithm.losses import resolve_loss
from roll.algorithm.streams import LossSpec, token_weights
from roll.config.schema import TrainConfig
from roll.data.batch import Batch
from roll.data.tokenlog import FloatArray
from roll.model.lora import Adapters
from roll.model.shape import ModelShape
from roll.strategy.train.balance import balance
from roll.strategy.train.base import NotFinite, UpdateStats
from roll.strategy.train.logprobs import token_log_probs
from roll.strategy.train.microbatch import MicroBatch, sequence
from roll.strategy.train.optimizer import MasterAdamW, learning_rate
from roll.strategy.train.passes import Passes
from roll.strategy.train.sharded.group import RankGroup
from roll.strategy.train.sharded.module import TrainModule
from roll.strategy.train.single import Seen, loss_streams
from roll.strategy.train.suspects import Suspects
from roll.strategy.train.updates import make_updates
from roll.transfer.weights import probe_ids

_COLUMNS = ("behaviour", "proximal", "ref", "advantages")


class ShardedStrategy:
    def __init__(
        self,
        module: TrainModule,
        model: PreTrainedModel,
        config: TrainConfig,
        group: RankGroup,
        dtype: torch.dtype,
        *,
        trainable: bool = True,
        adapters: Adapters | None = None,
    ) -> None:
        """`module` holds the model, sharded over the group's mesh; its layers compute in `dtype`."""
        self.model = model
        self.group = group
        self._module = module
        self._config = config
        self._adapters = adapters
        self._dtype = dtype
        self._shape = ModelShape.of_model(model)
        self._optimizer = MasterAdamW(model, config) if trainable else None
        self._passes = Passes(model, config, dtype=dtype)
        self._prompt = probe_ids(int(model.config.vocab_size))

    @torch.no_grad()
    def log_probs(self, batch: Batch, *, base: bool = False) -> FloatArray:
        """The log-probs of this rank's batch; the other ranks ask for those of their own at the same time."""
        assert not base or self._adapters is not None, "a model without adapters is no longer its base"
        result = np.zeros(batch.tokens, np.float32)
        with self._adapters.off() if base and self._adapters is not None else nullcontext():
            passes = [(micro, own, self._current(micro)[0]) for micro, own in self._in_step(batch)]
        for micro, own, current in passes:  # nothing waits for the device before all passes are launched
            if own:
                result[micro.where] = current.cpu().numpy()
        return result

    def update(self, batch: Batch, loss: LossSpec, step: int) -> UpdateStats:
        """Trains on the batch, which every rank has whole."""
        if "advantage" not in batch:
            raise ValueError("the batch has no column 'advantage': credit it before an update")
        if self._config.several_updates and "proximal" not in batch:
            batch = batch.with_columns(proximal=self._log_probs_of_all(batch))
        batch = batch.with_columns(advantages=token_credit(batch, loss.credit).advantages)
        lr = learning_rate(self._config, step)
        with self._adapters.dropping(step) if self._adapters is not None else nullcontext():
            stats = make_updates(batch, self._config, lr, lambda part: self._update_once(part, loss, step))
        return stats.with_memory(self._passes.limit_rows, 0)

    def _log_probs_of_all(self, batch: Batch) -> FloatArray:
        """The whole batch's log-probs on every rank, each of which computes those of its samples."""
        own = balance(batch, self.group.ranks, self._shape).parts[self.group.rank]
        result = np.zeros(batch.tokens, np.float32)
        result[batch.token_indices(own)] = self.log_probs(batch.select(own))
        whole = self.group.sum(torch.from_numpy(result).to(self.group.device))
        return np.asarray(whole.cpu().numpy(), np.float32)

    def _update_once(self, batch: Batch, spec: LossSpec, step: int) -> UpdateStats:
        assert self._optimizer is not None, "a frozen model cannot be updated"
        self._passes.check_lengths(batch)  # on every rank: one that raised alone would leave the others waiting
        loss_of, weights = resolve_loss(spec), token_weights(batch, spec.aggregation, spec.length)
        placed = balance(batch, self.group.ranks, self._shape)
        own = placed.parts[self.group.rank]
        part, weights = batch.select(own), weights[batch.token_indices(own)]
        columns = {name: part[name] for name in _COLUMNS if name in part}
        seen, suspects, rows = Seen(), Suspects(), 0
        for micro, real in self._in_step(part):
            current, entropy = self._current(micro, entropy_gradient=spec.wants_entropy)
            if not real:
                (current.sum() * 0.0).backward()  # type: ignore[no-untyped-call]
                continue
            streams = loss_streams(micro, current, entropy, columns)
            token_loss = loss_of(streams)
            weighted = (token_loss.values * micro.column(weights)).sum()
            current.retain_grad()
            weighted.backward()  # type: ignore[no-untyped-call]
            seen.add(weighted.detach(), streams, token_loss, spec)
            suspects.add(micro, token_loss.values, current.grad)
            rows += micro.rows
        seen.join(self.group)
        done = self._optimizer.step(step, seen.loss)
        total, metrics = seen.result()
        sick = NotFinite()
        if not done.applied:
            samples = [name for names in self.group.gathered(suspects.guilty(part)) for name in names]
            sick = NotFinite(tuple(samples), done.sick)
        norm = done.norm if done.applied else math.nan
        metrics["imbalance"] = placed.imbalance
        rows = int(self.group.sum(torch.tensor(rows, device=self.group.device)))
        return UpdateStats(total, norm, 0.0, rows, batch.tokens, 1, int(not done.applied), sick, metrics)

    def _in_step(self, batch: Batch) -> Iterator[tuple[MicroBatch, bool]]:
        """This rank's micro-batches, each with whether it is one of its own, as many on every rank."""
        micros = list(self._passes.over(batch)) if len(batch) else []
        return self.group.in_step(micros, len(micros), sequence(self._prompt.numpy()[:2], self.model, self._dtype))

    def _current(self, micro: MicroBatch, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        def run() -> tuple[Tensor, Tensor]:
            hidden = self._passes.hidden(micro)
            return token_log_probs(self.model, hidden, micro.predictions, entropy_gradient=entropy_gradient)

        found: tuple[Tensor, Tensor] = self._module(run)
        return found

    @torch.no_grad()
    def probe(self) -> tuple[Tensor, Tensor]:
        """The fixed prompt, and the log-probs of its tokens after the first. Every rank computes them."""
        inputs = sequence(self._prompt.numpy(), self.model, self._dtype)
        return self._prompt, self._current(inputs)[0].cpu()
