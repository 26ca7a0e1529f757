"""Training in one process on one device: packed prefix trees, micro-batches by tokens, fp32 masters.

What always holds: the gradient is that of the whole batch's loss, whatever the micro-batches (`token_weights` fixes every
token's weight before the cut); parameters are written in place.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from roll.algorithm.correction import Mismatch
from roll.algorithm.credit import token_credit
from roll.algorithm.losses import resolve_loss
from roll.algorithm.streams import LossSpec, Streams, token_weights
from roll.config.errors import RunError
from roll.config.schema import TrainConfig
from roll.data.batch import Batch
from roll.data.columns import Indices
from roll.data.tokenlog import FloatArray
from roll.model.attention import forward_rows
from roll.model.loading import quiet
from roll.strategy.shelf import Level, Shelf
from roll.strategy.train.base import UpdateStats
from roll.strategy.train.logprobs import response_positions, token_log_probs
from roll.strategy.train.optimizer import MasterAdamW, learning_rate
from roll.strategy.train.packing import TreePlan, micro_batches, pack
from roll.transfer.weights import Weights, probe_ids


@dataclass(frozen=True)
class _Packed:
    """A micro-batch on the device. One value a sampled token: the row it is predicted from, its id and temperature, its
    values of the log-prob columns the batch has, and where it lies in the batch's token columns."""

    ids: Tensor
    positions: Tensor
    plan: TreePlan
    rows: Tensor
    targets: Tensor
    temperatures: Tensor
    log_probs: dict[str, Tensor]
    sample: Tensor
    turn: Tensor
    where: Indices


class SingleStrategy:
    def __init__(
        self, model: PreTrainedModel, tokenizer: Tokenizer, config: TrainConfig, *, trainable: bool = True
    ) -> None:
        self.model = model
        self._tokenizer = tokenizer
        self._config = config
        self._device = next(model.parameters()).device
        model.requires_grad_(trainable)
        self._optimizer = MasterAdamW(model, config) if trainable else None
        self._shelf = Shelf(self._device)

    @torch.no_grad()
    def log_probs(self, batch: Batch) -> FloatArray:
        result = np.zeros(batch.tokens, np.float32)
        for packed in self._micro_batches(batch):
            current, _ = self._current(packed)
            result[packed.where] = current.float().cpu().numpy()
        return result

    def update(self, batch: Batch, loss: LossSpec, step: int) -> UpdateStats:
        """Trains on the batch: one optimizer step, or `updates_per_step` of them over parts with whole groups."""
        if "advantage" not in batch:
            raise ValueError("the batch has no column 'advantage': call algorithm.credit(batch) before the update")
        parts = [batch]
        if self._config.updates_per_step > 1:
            batch = batch if "proximal" in batch else batch.with_columns(proximal=self.log_probs(batch))
            parts = [batch.select(indices) for indices in _by_groups(batch, self._config.updates_per_step)]
        parts = [part for part in parts if part.loss_mask.any()]
        if not parts:
            raise RunError("the batch has no sampled tokens to train on")
        done = [self._update_once(part, loss, step) for part in parts]
        sampled = [int(part.loss_mask.sum()) for part in parts]
        return _joined(done, sampled, batch, learning_rate(self._config, step))

    def _update_once(self, batch: Batch, spec: LossSpec, step: int) -> UpdateStats:
        assert self._optimizer is not None, "a frozen model cannot be updated"
        loss_of = resolve_loss(spec)
        weights = token_weights(batch, spec.aggregation, spec.length)
        sampled = int(batch.loss_mask.sum())
        advantages = token_credit(batch, spec.credit).advantages
        total, rows, mismatch = 0.0, 0, Mismatch()
        sums: dict[str, float] = defaultdict(float)
        for packed in self._micro_batches(batch):
            current, entropy = self._current(packed)
            streams = Streams(
                current=current,
                proximal=packed.log_probs.get("proximal", current.detach()),
                behaviour=packed.log_probs["behaviour"],
                advantage=self._column(advantages, packed.where),
                sample=packed.sample,
                turn=packed.turn,
                ref=packed.log_probs.get("ref"),
                entropy=entropy,
            )
            token_loss = loss_of(streams)
            weighted = (token_loss.values * self._column(weights, packed.where)).sum()
            weighted.backward()  # type: ignore[no-untyped-call]
            total += float(weighted.detach())
            rows += len(packed.ids)
            mismatch.add(streams, spec.correction)
            for name, values in {**token_loss.metrics, "entropy": entropy}.items():
                sums[name] += float(values.sum())
        norm = self._optimizer.step(step) if math.isfinite(total) else math.nan
        self._optimizer.zero_grad()
        metrics = {name: value / sampled for name, value in sums.items()} | mismatch.metrics()
        return UpdateStats(total, norm, 0.0, rows, batch.tokens, 1, skipped=int(not math.isfinite(norm)), metrics=metrics)

    def weights(self, version: int) -> Weights:
        parameters = dict(self.model.named_parameters())
        prompt = probe_ids(int(self.model.config.vocab_size))
        return Weights(version, self.model, parameters, prompt, self._probe(prompt))

    def hold(self, level: Level) -> None:
        own = self._optimizer.tensors() if self._optimizer is not None else {}
        weights: dict[str, Tensor] = dict(self.model.named_parameters())
        aside = {"all": {}, "weights": own, "none": {**weights, **own}}[level]
        here = {"all": {**weights, **own}, "weights": weights, "none": {}}[level]
        self._shelf.lay_aside(aside)
        self._shelf.bring_back(here)

    def save(self, folder: Path) -> None:
        assert self._optimizer is not None, "a frozen model has nothing to save"
        with quiet():
            self.model.save_pretrained(folder / "model", max_shard_size="1TB")  # one file, whatever the size
        self._tokenizer.save_pretrained(folder / "model")
        self._optimizer.save(folder / "optimizer.safetensors")

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote, into the parameters' own storage."""
        assert self._optimizer is not None, "a frozen model is not resumed"
        saved = load_file(folder / "model" / "model.safetensors")
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(saved[name])
        self._optimizer.load(folder / "optimizer.safetensors")

    @torch.no_grad()
    def _probe(self, prompt: Tensor) -> Tensor:
        """Log-probs of the probe prompt's own tokens after the first."""
        ids = prompt.numpy().astype(np.int32)
        plan = TreePlan(pack([ids]), self._device)
        positions = torch.arange(len(prompt), device=self._device)
        hidden = forward_rows(self.model, prompt.to(self._device), positions, plan)
        rows, ones = positions[:-1], torch.ones(len(prompt) - 1, device=self._device)
        return token_log_probs(self.model, hidden, rows, prompt[1:].to(self._device), ones)[0].float().cpu()

    def _current(self, packed: _Packed) -> tuple[Tensor, Tensor]:
        hidden = forward_rows(self.model, packed.ids, packed.positions, packed.plan)
        return token_log_probs(self.model, hidden, packed.rows, packed.targets, packed.temperatures)

    def _micro_batches(self, batch: Batch) -> Iterator[_Packed]:
        sequences, masks = batch.rows("ids"), batch.rows("loss_mask")
        watched = {name: batch.rows(name) for name in ("behaviour", "proximal", "ref") if name in batch}
        wanted = np.flatnonzero([mask.any() for mask in masks])  # a sample without sampled tokens has nothing to compute
        for cut in micro_batches([sequences[i] for i in wanted], self._config.micro_batch_tokens):
            members = wanted[cut]
            tree = pack([sequences[i] for i in members])
            spots = [response_positions(masks[i]) for i in members]
            rows = [path[spot - 1] for path, spot in zip(tree.paths, spots, strict=True)]
            targets = [sequences[i][spot] for i, spot in zip(members, spots, strict=True)]
            where = [batch.offsets[i] + spot for i, spot in zip(members, spots, strict=True)]
            heat = [np.full(len(spot), batch["temperature"][i]) for i, spot in zip(members, spots, strict=True)]
            known = {
                name: np.concatenate([rows_of[i][spot] for i, spot in zip(members, spots, strict=True)])
                for name, rows_of in watched.items()
            }
            sizes = [len(spot) for spot in spots]
            turns = [_turns_of(batch, i, spot) for i, spot in zip(members, spots, strict=True)]
            yield _Packed(
                ids=self._tensor(tree.ids.astype(np.int64)),
                positions=self._tensor(tree.positions.astype(np.int64)),
                plan=TreePlan(tree, self._device),
                rows=self._tensor(np.concatenate(rows)),
                targets=self._tensor(np.concatenate(targets).astype(np.int64)),
                temperatures=self._tensor(np.concatenate(heat)),
                log_probs={name: self._tensor(values.astype(np.float32)) for name, values in known.items()},
                sample=self._tensor(np.repeat(np.arange(len(members)), sizes)),
                turn=self._tensor(_numbered(turns)),
                where=np.concatenate(where),
            )

    def _column(self, values: NDArray[Any], where: Indices) -> Tensor:
        return self._tensor(values[where].astype(np.float32))

    def _tensor(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _turns_of(batch: Batch, sample: int, spots: Indices) -> Indices:
    """The turn of each sampled token: sampled tokens with others between them are of different turns."""
    if "turn" in batch:
        return np.asarray(batch.rows("turn")[sample][spots], np.int64)
    return np.cumsum(np.diff(spots, prepend=spots[:1]) > 1)


def _numbered(turns: list[Indices]) -> Indices:
    """Turns of several samples, numbered on: below the number of tokens."""
    first, numbers = 0, []
    for own in turns:
        numbers.append(np.unique(own, return_inverse=True)[1].reshape(-1) + first)
        first = int(numbers[-1][-1]) + 1
    return np.concatenate(numbers)


def _by_groups(batch: Batch, parts: int) -> list[Indices]:
    """Cuts a batch into parts of whole groups, in order, as even as they go."""
    groups = list(dict.fromkeys(batch["group"].tolist()))
    pieces = np.array_split(np.array(groups), min(parts, len(groups)))
    return [np.flatnonzero(np.isin(batch["group"], piece)) for piece in pieces]


def _joined(done: list[UpdateStats], sampled: list[int], batch: Batch, lr: float) -> UpdateStats:
    """The stats of a step from those of its updates; token means are weighed by the updates' sampled tokens."""
    share = [tokens / sum(sampled) for tokens in sampled]
    names = done[0].metrics
    metrics = {n: sum(w * s.metrics[n] for w, s in zip(share, done, strict=True)) for n in names}
    metrics["mismatch_max"] = max(s.metrics["mismatch_max"] for s in done)
    return UpdateStats(
        loss=sum(w * s.loss for w, s in zip(share, done, strict=True)),
        grad_norm=math.nan if any(math.isnan(s.grad_norm) for s in done) else max(s.grad_norm for s in done),
        lr=lr,
        rows=sum(s.rows for s in done),
        tokens=batch.tokens,
        updates=len(done),
        skipped=sum(s.skipped for s in done),
        metrics=metrics,
    )
