"""The micro-batch: some whole samples of a batch, packed, on the device.

What always holds: a sample is in one micro-batch or, without a sampled token, in none; every sampled token appears once.
Everything that depends on the data's values (sorting, unique rows) is settled on the host, so that a device never has to
be waited for to make one.

A sample that forks has a path through the rows for each of its branches: they are sequences of one sample.

Example: of the samples `[1 2 | 3 4]` and `[1 2 | 5]` (sampled tokens after the bar) the rows are `1 2 3 4 5`, and the
sampled tokens 3, 4, 5 are predicted from the rows 1, 2, 1; `sample` is `[0 0 1]`.
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
from roll.data.routes import signed
from roll.data.tokenlog import branches
from roll.model.attention import AttentionPlan, forward_rows
from roll.model.routing import FREE
from roll.strategy.train.packing import PrefixTree, cut, pack
from roll.strategy.train.target_index import TargetIndex, on_device
from roll.strategy.train.tree_attention import tree_plan


@dataclass(frozen=True)
class SampleRows:
    """All tokens of some samples, also those that were not sampled."""

    row: Tensor
    """[tokens]"""
    sample: Tensor
    """[tokens] the number of the token's sample within the micro-batch."""
    own: Tensor
    """[tokens] whether this process has the row."""
    lengths: Tensor
    """[samples] their tokens, as fp32."""

    @classmethod
    def of(cls, paths: Sequence[Indices], device: torch.device) -> SampleRows:
        """From the rows of each sample's tokens."""
        lengths = np.array([len(path) for path in paths])
        row, sample = np.concatenate(paths), np.repeat(np.arange(len(paths)), lengths)
        own = np.ones(len(row), np.bool_)
        return cls(*(on_device(values, device) for values in (row, sample, own, lengths.astype(np.float32))))


@dataclass(frozen=True)
class MicroBatch:
    """Rows of tokens, and the sampled ones among them: `where` each lies in the batch's token columns."""

    ids: Tensor
    positions: Tensor
    plan: AttentionPlan
    predictions: TargetIndex
    sample: Tensor
    """[tokens] the number of the token's sample within the micro-batch."""
    turn: Tensor
    """[tokens] the number of the token's turn within the micro-batch, counted through all its samples."""
    where: Indices
    members: Indices
    """The batch's samples it holds, in order."""
    ends: Tensor
    """[samples] the row of each sample's last token."""
    uses: Tensor
    """[rows] how many tokens of samples each row is, as fp32."""
    routes: Tensor | None = None
    """[rows, layers x chosen] the experts that the sampler sent each row to; None where it did not say."""
    samples: SampleRows | None = None
    """Where all tokens of the samples are, if it was asked for."""

    @property
    def rows(self) -> int:
        return len(self.ids)

    def hidden(self, model: PreTrainedModel) -> Tensor:
        """The last hidden state of every row."""
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
    """The batch as micro-batches for the model, of at most `limit_rows` rows or one sample each.

    Without `share` a prefix that samples have in common is computed for each of them. `dtype` is the precision that
    layers compute in, and `device` where, if these are not those of the parameters. With `routes` each says which experts
    the sampler sent its rows to, with `samples` where all tokens of its samples are.
    """
    device, dtype = device or model.device, dtype or model.dtype
    sequences, masks, spans = batch.rows("ids"), batch.rows("loss_mask"), _spans(batch)
    turns, heat = _turns(batch), batch["temperature"]
    known = batch.rows("routes") if routes and "routes" in batch else []
    recorded = any(each.shape[1] for each in known[:1])  # all have one width
    for members, tree in _packed(batch, limit_rows, share):
        found = iter(tree.paths)
        paths = [np.concatenate([next(found) for _ in spans[i]]) for i in members]
        spots = [response_positions(masks[i]) for i in members]
        counts = [len(spot) for spot in spots]
        where = np.concatenate([batch.offsets[i] + spot for i, spot in zip(members, spots, strict=True)])
        sample = np.repeat(np.arange(len(members)), counts)
        predictions = TargetIndex.of(
            rows=np.concatenate([path[spot - 1] for path, spot in zip(paths, spots, strict=True)]),
            targets=np.concatenate([sequences[i][spot] for i, spot in zip(members, spots, strict=True)]),
            temperatures=np.repeat(heat[members], counts),
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
            uses=on_device(np.bincount(np.concatenate(paths), minlength=tree.rows).astype(np.float32), device),
            routes=on_device(_of_rows([known[i] for i in members], paths, tree.rows), device) if recorded else None,
            samples=SampleRows.of(paths, device) if samples else None,
        )


def _of_rows(routes: Sequence[NDArray[Any]], paths: Sequence[Indices], rows: int) -> NDArray[np.int16]:
    """The experts of each row, as the first of the samples that go through it has them recorded."""
    found = np.full((rows, routes[0].shape[1]), FREE, np.int16)
    for unsigned, path in zip(reversed(routes), reversed(paths), strict=True):
        values = signed(unsigned)
        known = (values != FREE).all(1)
        found[path[known]] = values[known]
    return found


def largest_rows(batch: Batch, limit_rows: int, share: bool = True) -> int:
    """The rows of the largest of the batch's micro-batches; 0 where it has none."""
    return max((tree.rows for _, tree in _packed(batch, limit_rows, share)), default=0)


def _packed(batch: Batch, limit_rows: int, share: bool) -> Iterator[tuple[Indices, PrefixTree]]:
    """The samples of each micro-batch, and their prefix tree."""
    sequences, masks, spans = batch.rows("ids"), batch.rows("loss_mask"), _spans(batch)
    wanted = np.flatnonzero([mask.any() for mask in masks])
    for piece in cut([sequences[i] for i in wanted], limit_rows, share):
        members = wanted[piece]
        yield members, pack([sequences[i][span] for i in members for span in spans[i]], share)


def _spans(batch: Batch) -> list[list[slice]]:
    """Where the branches of each sample are among its tokens."""
    return [branches(turn) for turn in batch.rows("turn")] if "turn" in batch else [[slice(None)]] * len(batch)


def sequence(
    ids: NDArray[Any], model: PreTrainedModel, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> MicroBatch:
    """One sequence, every token after its first to be predicted at temperature 1."""
    sampled = np.arange(len(ids)) > 0
    columns = {"ids": ids.astype(np.int32), "loss_mask": sampled, "temperature": np.ones(1, np.float32)}
    batch = Batch(np.array([0, len(ids)]), columns)
    return next(micro_batches(batch, len(ids), model, dtype=dtype, device=device))


def response_positions(
    loss_mask: np.ndarray[tuple[int], np.dtype[np.bool_]],
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Where a sample's trained tokens are. The first token of a sequence has nothing to be predicted from."""
    where = np.flatnonzero(loss_mask)
    if len(where) and where[0] == 0:
        raise ValueError("the first token of a sample is marked as sampled: a token log begins with a prompt")
    return where


def _turns(batch: Batch) -> NDArray[np.int64]:
    """[tokens of the batch] which of its sample's responses a sampled token is in, by any rising numbers.

    Without a column that says so, a response is a run of sampled tokens: what is between two was not sampled.
    """
    if "turn" in batch:
        return np.asarray(batch["turn"], np.int64)
    mask = batch.loss_mask
    begins = mask & ~np.concatenate([[False], mask[:-1]])
    return np.cumsum(begins)


def _numbered(sample: NDArray[np.int64], turn: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 0, 1, …: a new number wherever the sample or the turn changes."""
    changes = (np.diff(sample) != 0) | (np.diff(turn) != 0)
    return np.concatenate([np.zeros(min(len(sample), 1), np.int64), np.cumsum(changes)])
