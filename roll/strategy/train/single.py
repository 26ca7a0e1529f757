"""Training in one process on one device: packed prefix trees, micro-batches by tokens, fp32 masters.

What always holds: the gradient is that of the whole batch's loss, whatever the micro-batches (`token_weights` fixes every
token's weight before the cut); parameters are written in place.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from roll.algorithm.correction import Mismatch
from roll.algorithm.credit import token_credit
from roll.algorithm.losses import resolve_loss
from roll.algorithm.streams import LossSpec, Streams, TokenLoss, token_weights
from roll.config.schema import TrainConfig
from roll.data.batch import Batch
from roll.data.columns import Array
from roll.data.tokenlog import FloatArray
from roll.model.loading import quiet
from roll.model.lora import Adapters
from roll.strategy.shelf import Level, Shelf
from roll.strategy.train.base import NotFinite, UpdateStats
from roll.strategy.train.logprobs import token_log_probs
from roll.strategy.train.microbatch import MicroBatch
from roll.strategy.train.optimizer import MasterAdamW, learning_rate
from roll.strategy.train.passes import Passes
from roll.strategy.train.probe import Probe
from roll.strategy.train.suspects import Suspects
from roll.strategy.train.updates import make_updates
from roll.transfer.weights import Weights

if TYPE_CHECKING:
    from roll.strategy.train.sharded.group import RankGroup


class SingleStrategy:
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        config: TrainConfig,
        *,
        trainable: bool = True,
        adapters: Adapters | None = None,
    ) -> None:
        """With `adapters` in the model, only they are trained and saved."""
        self.model = model
        self._adapters = adapters
        self._tokenizer = tokenizer
        self._config = config
        self._device = next(model.parameters()).device
        if adapters is None:
            model.requires_grad_(trainable)
        self._optimizer = MasterAdamW(model, config) if trainable else None
        self._passes = Passes(model, config)
        self._probe = Probe(model)
        self._shelf = Shelf(self._device)

    @torch.no_grad()
    def log_probs(self, batch: Batch, *, base: bool = False) -> FloatArray:
        assert not base or self._adapters is not None, "a model without adapters is no longer its base"
        with self._adapters.off() if base and self._adapters is not None else nullcontext():
            result = self._passes.attempt(batch, lambda: self._log_probs(batch))
        if self._optimizer is None:
            self._passes.warn_of_retries()  # a frozen model makes no update that would say it
        return result

    def _log_probs(self, batch: Batch) -> FloatArray:
        result = np.zeros(batch.tokens, np.float32)
        done = [(micro.where, self._current(micro)[0]) for micro in self._passes.over(batch)]
        for where, current in done:  # nothing waits for the device before all is under way
            result[where] = current.cpu().numpy()
        return result

    def update(self, batch: Batch, loss: LossSpec, step: int) -> UpdateStats:
        if "advantage" not in batch:
            raise ValueError("the batch has no column 'advantage': credit it before an update")
        if self._config.several_updates and "proximal" not in batch:
            batch = batch.with_columns(proximal=self.log_probs(batch))
        batch = batch.with_columns(advantages=token_credit(batch, loss.credit).advantages)
        lr = learning_rate(self._config, step)
        with self._adapters.dropping(step) if self._adapters is not None else nullcontext():
            stats = make_updates(batch, self._config, lr, lambda part: self._update_once(part, loss, step))
        return stats.with_memory(self._passes.limit_rows, self._passes.take_retries())

    def _update_once(self, batch: Batch, spec: LossSpec, step: int) -> UpdateStats:
        optimizer = self._optimizer
        assert optimizer is not None, "a frozen model cannot be updated"
        loss_of = resolve_loss(spec)
        work = partial(self._gradients, batch, spec, loss_of)
        seen, suspects, rows = self._passes.attempt(batch, work, undo=optimizer.zero_grad)
        done = optimizer.step(step, seen.loss)
        total, metrics = seen.result()
        sick = NotFinite() if done.applied else NotFinite(suspects.guilty(batch), done.sick)
        norm = done.norm if done.applied else math.nan
        return UpdateStats(total, norm, 0.0, rows, batch.tokens, 1, int(not done.applied), sick, metrics)

    def _gradients(
        self, batch: Batch, spec: LossSpec, loss_of: Callable[[Streams], TokenLoss]
    ) -> tuple[Seen, Suspects, int]:
        """Sums the gradients of an update, and says what was seen on the way and how many rows were computed."""
        weights = token_weights(batch, spec.aggregation, spec.length)
        columns = {name: batch[name] for name in ("behaviour", "proximal", "ref", "advantages") if name in batch}
        seen, suspects, rows = Seen(), Suspects(), 0
        for micro in self._passes.over(batch):
            current, entropy = self._current(micro, entropy_gradient=spec.wants_entropy)
            streams = loss_streams(micro, current, entropy, columns)
            token_loss = loss_of(streams)
            weighted = (token_loss.values * micro.column(weights)).sum()
            current.retain_grad()
            weighted.backward()  # type: ignore[no-untyped-call]
            seen.add(weighted.detach(), streams, token_loss, spec)
            suspects.add(micro, token_loss.values, current.grad)
            rows += micro.rows
        return seen, suspects, rows

    def weights(self, version: int) -> Weights:
        parameters = dict(self.model.named_parameters())
        return Weights(version, self.model, parameters, self._probe.prompt, self._probe.log_probs())

    def hold(self, level: Level) -> None:
        own = self._optimizer.tensors() if self._optimizer is not None else {}
        self._shelf.hold(level, dict(self.model.named_parameters()), own)

    def save(self, folder: Path) -> None:
        assert self._optimizer is not None, "a frozen model has nothing to save"
        if self._adapters is not None:
            self._adapters.save(folder / "model")
        else:
            with quiet():
                self.model.save_pretrained(folder / "model", max_shard_size="1TB")  # one file, whatever the size
        self._tokenizer.save_pretrained(folder / "model")
        self._optimizer.save(folder / "optimizer.safetensors")
        self._passes.save(folder)

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote, into the parameters' own storage."""
        assert self._optimizer is not None, "a frozen model is not resumed"
        if self._adapters is not None:
            self._adapters.load(folder / "model")
        else:
            saved = load_file(folder / "model" / "model.safetensors")
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    parameter.copy_(saved[name])
        self._optimizer.load(folder / "optimizer.safetensors")
        self._passes.load(folder)

    def _current(self, micro: MicroBatch, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        hidden = self._passes.hidden(micro)
        return token_log_probs(self.model, hidden, micro.predictions, entropy_gradient=entropy_gradient)


class Seen:
    """Sums over micro-batches, kept on the device: reading one would wait for everything under way."""

    def __init__(self) -> None:
        self.loss: Tensor = torch.zeros(())
        self._sums: dict[str, Tensor | float] = defaultdict(float)
        self._mismatch = Mismatch()

    def add(self, loss: Tensor, streams: Streams, token_loss: TokenLoss, spec: LossSpec) -> None:
        assert streams.entropy is not None
        self.loss = self.loss.to(loss.device) + loss
        for name, values in {**token_loss.metrics, "entropy": streams.entropy}.items():
            self._sums[name] += values.detach().sum()
        self._mismatch.add(streams, spec.correction)

    def join(self, group: RankGroup) -> None:
        """Adds what the other ranks have seen: a rank may have seen nothing."""
        names = sorted(set().union(*group.gathered(set(self._sums))))
        sums = [self.loss.double(), *(torch.as_tensor(self._sums[name], dtype=torch.float64) for name in names)]
        joined = group.sum(torch.stack([value.to(group.device) for value in sums]))
        self.loss = joined[0]
        self._sums = defaultdict(float, zip(names, joined[1:], strict=True))
        self._mismatch.join(group)

    def result(self) -> tuple[float, dict[str, float]]:
        """The loss, and the metrics as means over the sampled tokens."""
        metrics = {name: float(value) / self._mismatch.tokens for name, value in self._sums.items()}
        return float(self.loss), {**metrics, **self._mismatch.metrics()}


def loss_streams(micro: MicroBatch, current: Tensor, entropy: Tensor, columns: Mapping[str, Array]) -> Streams:
    known = {name: micro.column(values) for name, values in columns.items()}
    return Streams(
        current=current,
        proximal=known.get("proximal", current.detach()),
        behaviour=known["behaviour"],
        advantage=known["advantages"],
        sample=micro.sample,
        turn=micro.turn,
        ref=known.get("ref"),
        entropy=entropy,
    )
