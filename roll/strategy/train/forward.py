"""A trainer's forward passes over a batch: how the batch is split into micro-batches, and how the decoder runs over one.

Invariant: if the device runs out of memory, the pass is repeated from its start, once, with smaller micro-batches, and
all later passes keep that limit. The result is the same as if the smaller micro-batches had been used from the start.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from roll.cluster.mesh import MeshShape
from roll.config.errors import RunError, UserError
from roll.config.schema import TrainConfig
from roll.data.batch import Batch
from roll.data.tokenlog import branches
from roll.model.lora import adapted_layers
from roll.model.rope import longest_sequence
from roll.model.shape import ModelShape
from roll.strategy.train.activation_memory import Footprint
from roll.strategy.train.layer_wrapping import LayerWrapping, Within, compiles
from roll.strategy.train.microbatch import MicroBatch, largest_rows, micro_batches
from roll.strategy.train.microbatch_budget import Budget, activation_budget_of, choose
from roll.strategy.train.nonfinite import sample_name
from roll.strategy.train.out_of_memory import error_sentence, free_memory, is_out_of_memory, retry_warning, save_rng_state
from roll.strategy.train.sharded.sizes import of_rank

_log = logging.getLogger(__name__)

FILE = "micro_batches.json"
"""Written beside a checkpoint's optimizer if memory ran out before the checkpoint."""
SHORTER = "a smaller rollout.max_new_tokens (in pipeline sft data.max_tokens)"

T = TypeVar("T")


class WorkRanks(Protocol):
    """The ranks that compute one batch together."""

    @property
    def shape(self) -> MeshShape: ...

    def least(self, value: int) -> int:
        """The minimum of `value` over all ranks."""
        ...


class ForwardRunner:
    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainConfig,
        *,
        setting: str = "train.micro_batch_tokens",
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        retries: bool = True,
        group: WorkRanks | None = None,
    ) -> None:
        """`setting` is the config key that `config.micro_batch_tokens` came from, for messages. `dtype` and `device` are
        where the layers compute, if they differ from those of the parameters. Without `retries`, running out of memory
        ends the run at once: one rank cannot repeat a pass while the other ranks start the next. All ranks of a `group`
        split batches the same way."""
        self._model, self._config, self._setting = model, config, setting
        self._may_retry = retries
        self._group = group
        self._dtype, self._device = dtype or model.dtype, device or model.device
        adapted = bool(adapted_layers(model))
        tensor = 1 if group is None else group.shape.tensor
        self._compiled = compiles(config.compile, self._device.type, self._dtype, adapted=adapted, tensor=tensor)
        self._layers = LayerWrapping(model, compiled=self._compiled)
        self._budget: Budget | None = None
        self._most_rows: int | None = None
        """Limit on packed tokens per micro-batch since memory ran out; None if it has not."""
        self._retries = 0

    @property
    def limit_rows(self) -> int:
        """The current limit on packed tokens per micro-batch; 0 before the first batch."""
        return self._budget.rows if self._budget is not None else 0

    def take_retries(self) -> int:
        """The number of passes repeated since the last call because the device ran out of memory. Resets the count."""
        taken, self._retries = self._retries, 0
        return taken

    def attempt(self, batch: Batch, work: Callable[[], T], undo: Callable[[], None] | None = None) -> T:
        """Returns the result of `work`, which iterates over the batch from its start on every call.

        If the device runs out of memory, `undo` drops the partial results and `work` is called once more, with
        micro-batches smaller than the largest one so far; the smaller limit stays in force for all later batches. Running
        out of memory a second time ends the run.
        """
        restore = save_rng_state(self._device)
        try:
            return work()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = error_sentence(error)
            if not self._may_retry:
                raise self._too_small(batch, reason) from error
        if undo is not None:
            undo()
        free_memory(self._device)
        before, checkpointed = self._shrink(batch, reason), self._checkpointed
        self._retries += 1
        restore()
        try:
            return work()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            longest, rows = _longest(batch)[1], self.limit_rows
            smaller = f"{self._setting}={max(rows // 2, longest)}" if rows > longest else SHORTER
            raise RunError(
                f"the GPU ran out of memory with up to {before} tokens in a micro-batch, and again with up to {rows} "
                f"({error_sentence(error)}); {self._setting} is {self._configured}: write {smaller}"
                f"{_or_checkpointing(checkpointed)}, and resume the run"
            ) from error

    def _too_small(self, batch: Batch, reason: str) -> RunError:
        longest, rows = _longest(batch)[1], self.limit_rows
        smaller = f"{self._setting}={max(rows // 2, longest)}" if rows > longest else SHORTER
        return RunError(
            f"the GPU ran out of memory with up to {rows} tokens in a micro-batch ({reason}); {self._setting} is "
            f"{self._configured}: write {smaller}{_or_checkpointing(self._checkpointed)}, and resume the run"
        )

    def prepare(self, batch: Batch) -> None:
        """Chooses the micro-batch limit from the whole batch, and refuses a sample that is too long. All ranks get the
        same result, because each calls this with the whole batch, not with its own share."""
        self.budget(batch)
        self.check_lengths(batch)

    def warn_of_retries(self) -> None:
        """Logs repeated passes, for a role that makes no updates whose stats would report them."""
        if self.take_retries():
            _log.warning("%s", retry_warning(self._setting, self.limit_rows))

    def over(self, batch: Batch, *, routers: bool = False) -> Iterator[MicroBatch]:
        """The micro-batches of the batch. With `routers`, they carry the recorded routes and, if there is a router
        balance loss, the samples that tokens belong to."""
        if not len(batch):
            return iter(())
        budget = self.budget(batch)
        self.check_lengths(batch)
        share = self._config.share_prefixes
        balanced = routers and self._config.router_balance_loss > 0
        return micro_batches(
            batch, budget.rows, self._model, share, self._dtype, self._device, routes=routers, samples=balanced
        )

    def hidden(self, micro: MicroBatch, within: Within | None = None) -> Tensor:
        """The last hidden state of every packed token. Each layer runs inside the context that `within` returns."""
        with self._layers.running(checkpointed=self._checkpointed, within=within):
            return micro.hidden(self._model)

    def save(self, folder: Path) -> None:
        """Writes the reduced micro-batch limit, if running out of memory reduced it."""
        if self._most_rows is not None:
            stored = {"asked_tokens": self._config.micro_batch_tokens, "most_tokens": self._most_rows}
            (folder / FILE).write_text(json.dumps(stored), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Restores the limit that `save` wrote, unless `micro_batch_tokens` has changed since."""
        self._most_rows = None
        if (folder / FILE).is_file():
            stored = json.loads((folder / FILE).read_text(encoding="utf-8"))
            if stored["asked_tokens"] == self._config.micro_batch_tokens:
                self._most_rows = int(stored["most_tokens"])
        if self._budget is not None:
            self._budget = self._within(self._budget)

    @property
    def _checkpointed(self) -> bool:
        return self._budget is not None and self._budget.checkpointed

    @property
    def _configured(self) -> str:
        return str(self._config.micro_batch_tokens) if self._config.micro_batch_tokens else "0, which is what fits"

    def _within(self, budget: Budget) -> Budget:
        return budget if self._most_rows is None else replace(budget, rows=min(budget.rows, self._most_rows))

    def _shrink(self, batch: Batch, reason: str) -> int:
        """Halves the micro-batch limit until the batch's largest micro-batch becomes smaller. Returns the packed tokens
        of the largest one before. The limit does not fall below the longest sample, because a sample is never split."""
        budget, (name, longest) = self.budget(batch), _longest(batch)
        largest = rows = largest_rows(batch, budget.rows, self._config.share_prefixes)
        limit = budget.rows
        while rows >= largest:
            if limit <= longest:
                raise RunError(
                    f"the GPU ran out of memory with a micro-batch of {largest} tokens ({reason}), and smaller ones "
                    f"cannot be made: sample {name} has {longest} tokens and is not cut ({self._setting} is "
                    f"{self._configured}); write {SHORTER}{_or_checkpointing(budget.checkpointed)}, or leave the GPU "
                    "more memory, and resume the run"
                )
            limit = max(limit // 2, longest)
            rows = largest_rows(batch, limit, self._config.share_prefixes)
        self._most_rows = limit
        self._budget = self._within(budget)
        return largest

    def check_lengths(self, batch: Batch) -> None:
        """Raises if a sample with sampled tokens is longer than the model's context or than `micro_batch_tokens`."""
        if not len(batch):
            return
        name, tokens = _longest(batch)
        context, limit = longest_sequence(self._model.config), self._config.micro_batch_tokens
        if tokens > context and (longest := _longest_branch(batch, context)) is not None:
            name, tokens = sample_name(batch, longest[0]), longest[1]
            raise UserError(
                f"sample {name} has {tokens} tokens, but the model's context is {context}: write a smaller "
                f"rollout.max_new_tokens, or in pipeline sft data.max_tokens={context} and data.too_long=drop or cut"
            )
        if 0 < limit < tokens:
            raise UserError(
                f"sample {name} has {tokens} tokens, but train.micro_batch_tokens is {limit}: write "
                f"train.micro_batch_tokens={tokens} or more, or a smaller rollout.max_new_tokens"
            )

    def budget(self, batch: Batch) -> Budget:
        """The micro-batch limit. It is chosen at the first batch and kept, so that equal batches are split the same
        way."""
        if self._budget is None:
            longest = int(batch.lengths.max(initial=0))
            model, config = self._model, self._config
            shape, mesh = ModelShape.of_model(model), None if self._group is None else self._group.shape
            shape = shape if mesh is None else of_rank(shape, mesh)
            footprint = Footprint(shape, self._dtype, self._device.type, self._compiled)
            rows, checkpointing = config.micro_batch_tokens, config.activation_checkpointing
            available = activation_budget_of(model, footprint, config.optimizer, self._device, mesh)
            if available is not None and self._group is not None:
                available = self._group.least(available)
            self._budget = self._within(choose(footprint, rows, checkpointing, longest, available))
            if available is not None and not rows and self._budget.rows < longest:
                _log.warning(
                    "the GPU has memory for %d tokens in a micro-batch beside its present contents: samples are trained "
                    "on one by one, which is slow; end other programs on it, or write a smaller rollout.kv_cache_tokens",
                    self._budget.rows,
                )
        return self._budget


def _longest(batch: Batch) -> tuple[str, int]:
    """The longest sample with sampled tokens: its name and its number of tokens."""
    lengths = np.where(batch.sum_tokens(batch.loss_mask) > 0, batch.lengths, 0)
    return sample_name(batch, int(lengths.argmax())), int(lengths.max())


def _or_checkpointing(already: bool) -> str:
    return "" if already else " or train.activation_checkpointing=on"


def _longest_branch(batch: Batch, limit: int) -> tuple[int, int] | None:
    """The index and length of the sample with the longest token sequence, if that is longer than the limit."""
    turns = batch.rows("turn") if "turn" in batch else [np.zeros(length, np.int32) for length in batch.lengths]
    longest = [max(span.stop - span.start for span in branches(turn)) if len(turn) else 0 for turn in turns]
    index = int(np.argmax(longest))
    return (index, longest[index]) if longest[index] > limit else None
