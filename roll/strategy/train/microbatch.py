"""A micro-batch: some whole samples of a batch, packed, on the device.

Invariants: a sample is in exactly one micro-batch, or in none if it has no sampled token; every sampled token appears
once. Everything that depends on the values of the data (sorting, unique packed tokens) is computed on the host, so that
building a micro-batch never waits for the device.

A sample that forks has one path through the packed tokens per branch: these are several sequences of one sample.

Example: the samples `[1 2 | 3 4]` and `[1 2 | 5]` (sampled tokens after the bar) give the packed tokens `1 2 3 4 5`. The
sampled tokens 3, 4, 5 are predicted from the packed tokens with index 1, 2, 1; `sample` is `[0 0 1]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from roll.data.batch import Batch
from roll.data.remote_columns import Indices
from roll.data.routes import to_signed
from roll.data.tokenlog import FORK, branches
from roll.model.attention import AttentionPlan, forward_rows
from roll.model.routing import FREE
from roll.strategy.train.packing import PrefixTree, cut, pack
from roll.strategy.train.target_index import TargetIndex, on_device
from roll.strategy.train.tree_attention import tree_plan


@dataclass(frozen=True)
class SampleRows:
    """All tokens of some samples, including those that were not sampled."""

    row: Tensor
    """[tokens] the index of the packed token."""
    sample: Tensor
    """[tokens] the index of the token's sample within the micro-batch."""
    own: Tensor
    """[tokens] whether this process has the packed token."""
    lengths: Tensor
    """[samples] their number of tokens, as fp32."""

    @classmethod
    def of(cls, paths: Sequence[Indices], device: torch.device) -> SampleRows:
        """From the packed-token indices of each sample's tokens."""
        lengths = np.array([len(path) for path in paths])
        row, sample = np.concatenate(paths), np.repeat(np.arange(len(paths)), lengths)
        own = np.ones(len(row), np.bool_)
        return cls(*(on_device(values, device) for values in (row, sample, own, lengths.astype(np.float32))))


@dataclass(frozen=True)
class MicroBatch:
    """Packed tokens, and the sampled ones among them: `where` has the index of each in the batch's token columns."""

    ids: Tensor
    positions: Tensor
    plan: AttentionPlan
    predictions: TargetIndex
    sample: Tensor
    """[tokens] the index of the token's sample within the micro-batch."""
    turn: Tensor
    """[tokens] the index of the token's turn within the micro-batch, counted through all its samples."""
    where: Indices
    members: Indices
    """Indices of its samples in the batch, in order."""
    ends: Tensor
    """[samples] the packed token of each sample's last token."""
    uses: Tensor
    """[packed tokens] how many tokens of samples each of them stands for, as fp32."""
    routes: Tensor | None = None
    """[packed tokens, layers x chosen] the experts that the engine routed each packed token to; None if it did not record
    them."""
    samples: SampleRows | None = None
    """All tokens of the samples, if requested."""

    @property
    def rows(self) -> int:
        return len(self.ids)

    def hidden(self, model: PreTrainedModel) -> Tensor:
        """The last hidden state of every packed token."""
        return forward_rows(model, self.ids, self.positions, self.plan)

    def column(self, values: NDArray[Any]) -> Tensor:
        """The sampled tokens' values of a token column, as fp32."""
        return on_device(values[self.where].astype(np.float32), self.ids.device)


def micro_batches(
    batch: Batch,
    limit_rows: int,
    model: PreTrainedModel,
    share: bool = True,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    *,
    routes: bool = False,
    samples: bool = False,
) -> Iterator[MicroBatch]:
    """The batch as micro-batches for the model, each of at most `limit_rows` packed tokens, or of one sample.

    Without `share`, a prefix that samples have in common is computed for each of them. `dtype` and `device` are where the
    layers compute, if they differ from those of the parameters. With `routes`, micro-batches have the recorded experts of
    their packed tokens; with `samples`, the packed tokens of all tokens of their samples.
    """
    device, dtype = device or model.device, dtype or model.dtype
    sequences, masks, spans = batch.rows("ids"), batch.rows("loss_mask"), _spans(batch)
    turns, temperatures = _turns(batch), batch["temperature"]
    known = batch.rows("routes") if routes and "routes" in batch else []
    recorded = any(each.shape[1] for each in known[:1])  # all have the same width
    for members, tree in _packed(batch, limit_rows, share):
        found = iter(tree.paths)
        paths = [next(found) if len(spans[i]) == 1 else np.concatenate([next(found) for _ in spans[i]]) for i in members]
        rows_of_tokens, ids = np.concatenate(paths), np.concatenate([sequences[i] for i in members])
        sampled, counts = sampled_positions([masks[i] for i in members])
        lengths = batch.lengths[members]
        where = sampled + np.repeat(batch.offsets[members] - (np.cumsum(lengths) - lengths), counts)
        sample = np.repeat(np.arange(len(members)), counts)
        predictions = TargetIndex.of(
            rows=rows_of_tokens[sampled - 1],
            targets=ids[sampled],
            temperatures=np.repeat(temperatures[members], counts),
            device=device,
        )
        yield MicroBatch(
            ids=on_device(tree.ids.astype(np.int64), device),
            positions=on_device(tree.positions.astype(np.int64), device),
            plan=tree_plan(tree, device, dtype),
            predictions=predictions,
            sample=on_device(sample, device),
            turn=on_device(_numbered(sample, turns[where]), device),
            where=where,
            members=members,
            ends=on_device(np.array([path[-1] for path in paths]), device),
            uses=on_device(np.bincount(rows_of_tokens, minlength=tree.rows).astype(np.float32), device),
            routes=on_device(_of_rows([known[i] for i in members], paths, tree.rows), device) if recorded else None,
            samples=SampleRows.of(paths, device) if samples else None,
        )


def _of_rows(routes: Sequence[NDArray[Any]], paths: Sequence[Indices], rows: int) -> NDArray[np.int16]:
    """The experts of each packed token, as recorded for the first sample that goes through it."""
    found = np.full((rows, routes[0].shape[1]), FREE, np.int16)
    for unsigned, path in zip(reversed(routes), reversed(paths), strict=True):
        values = to_signed(unsigned)
        known = (values != FREE).all(1)
        found[path[known]] = values[known]
    return found


def largest_rows(batch: Batch, limit_rows: int, share: bool = True) -> int:
    """Packed tokens of the batch's largest micro-batch; 0 if it has none."""
    return max((tree.rows for _, tree in _packed(batch, limit_rows, share)), default=0)


def _packed(batch: Batch, limit_rows: int, share: bool) -> Iterator[tuple[Indices, PrefixTree]]:
    """The samples of each micro-batch, and their prefix tree."""
    sequences, spans = batch.rows("ids"), _spans(batch)
    trained = np.flatnonzero(batch.sum_tokens(batch.loss_mask))
    for piece in cut([sequences[i] for i in trained], limit_rows, share):
        members = trained[piece]
        yield members, pack([sequences[i][span] for i in members for span in spans[i]], share)


def _spans(batch: Batch) -> list[list[slice]]:
    """The token ranges of each sample's branches."""
    if "turn" not in batch or not (batch["turn"] == FORK).any():
        return [[slice(None)]] * len(batch)
    return [branches(turn) for turn in batch.rows("turn")]


def sequence(
    ids: NDArray[Any], model: PreTrainedModel, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> MicroBatch:
    """One sequence; every token after the first is predicted, at temperature 1."""
    sampled = np.arange(len(ids)) > 0
    columns = {"ids": ids.astype(np.int32), "loss_mask": sampled, "temperature": np.ones(1, np.float32)}
    batch = Batch(np.array([0, len(ids)]), columns)
    return next(micro_batches(batch, len(ids), model, dtype=dtype, device=device))


def sampled_positions(masks: Sequence[NDArray[np.bool_]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of the trained tokens in the concatenation of the samples, and their number per sample. The first token of
    a sequence cannot be predicted from anything."""
    lengths = np.array([len(mask) for mask in masks])
    ends = np.cumsum(lengths)
    whole = np.concatenate(masks)
    if whole[(ends - lengths)[lengths > 0]].any():
        raise ValueError("the first token of a sample is marked as sampled: a token log begins with a prompt")
    sampled = np.flatnonzero(whole)
    return sampled, np.diff(np.searchsorted(sampled, ends), prepend=0)


def _turns(batch: Batch) -> NDArray[np.int64]:
    """[tokens of the batch] a number for the response that a sampled token is in, increasing within its sample.

    Without the column `turn`, a response is a run of consecutive sampled tokens.
    """
    if "turn" in batch:
        return np.asarray(batch["turn"], np.int64)
    mask = batch.loss_mask
    begins = mask & ~np.concatenate([[False], mask[:-1]])
    return np.cumsum(begins)


def _numbered(sample: NDArray[np.int64], turn: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 0, 1, …: the number increases wherever the sample or the turn changes."""
    changes = (np.diff(sample) != 0) | (np.diff(turn) != 0)
    return np.concatenate([np.zeros(min(len(sample), 1), np.int64), np.cumsum(changes)])
