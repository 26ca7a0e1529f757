"""Context parallelism (Ulysses): the packed tokens of a micro-batch are divided over ranks.

Each rank has an equal run of the packed tokens, padded at the end. Everything but attention works per token. Around
attention the ranks exchange: each sends all heads of its tokens and receives its heads of all tokens, so that the
attention plan of the prefix tree works as in one process. Each rank predicts from its own packed tokens; one sum then
gives all ranks the values of all tokens, so losses see whole samples. All ranks compute the same loss, and its gradient
flows back through each rank's own values.

Example: of 7 packed tokens and 4 heads, two ranks have the tokens 0-3 and 4-6 (and one padding token). The first attends
with heads 0 and 1, the second with 2 and 3, each over all 7 tokens.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from roll.model.attention import AttentionPlan
from roll.model.routing import FREE
from roll.strategy.train.microbatch import MicroBatch, SampleRows
from roll.strategy.train.target_index import TargetIndex


class ContextRows:
    """This rank's packed tokens of a micro-batch, and how their values are combined with those of the other ranks."""

    def __init__(self, micro: MicroBatch, group: dist.ProcessGroup) -> None:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self._group, self._whole = group, micro
        each = -(-micro.rows // ranks)
        self._begin, self._end = rank * each, (rank + 1) * each
        known, numbers = micro.predictions, micro.predictions.row_numbers
        first, last = (int(found) for found in np.searchsorted(numbers, [self._begin, self._end]))
        begin, end = int(known.pair_starts[first]), int(known.pair_starts[last])
        self._before, self._after = begin, len(known.targets) - end
        self._idle = begin == end
        predictions = (
            _one(micro.ids.device)
            if self._idle
            else TargetIndex(
                rows=known.rows[first:last] - self._begin,
                temperatures=known.temperatures[first:last],
                sources=known.sources[begin:end] - first,
                targets=known.targets[begin:end],
                pair_of=torch.arange(end - begin, device=known.targets.device),
                pair_starts=known.pair_starts[first : last + 1] - begin,
                row_numbers=numbers[first:last] - self._begin,
            )
        )
        self.micro = replace(
            micro,
            ids=self._own(micro.ids, ranks * each),
            positions=self._own(micro.positions, ranks * each),
            plan=UlyssesPlan(micro.plan, group, micro.rows),
            uses=self._own(micro.uses, ranks * each),
            predictions=predictions,
            routes=None if micro.routes is None else self._own(micro.routes, ranks * each, FREE),
            samples=None if micro.samples is None else self._tokens(micro.samples),
        )

    def tokens(self, values: Tensor) -> Tensor:
        """The values of all tokens of the micro-batch, from those of the pairs that this rank predicts."""
        if self._idle:
            values = values[:0] + 0.0 * values.sum()
        whole: Tensor = _SumOfParts.apply(pad(values, (self._before, self._after)), self._group)  # type: ignore[no-untyped-call]
        return whole[self._whole.predictions.pair_of]

    def sum(self, tensor: Tensor) -> Tensor:
        """Sums over the ranks that have the other packed tokens, in place."""
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def ends(self, hidden: Tensor) -> Tensor:
        """The hidden state of each sample's last packed token, [samples, dim], without gradients."""
        at = self._whole.ends - self._begin
        inside = (at >= 0) & (at < len(hidden))
        found = hidden[at.clamp(0, len(hidden) - 1)] * inside[:, None]
        dist.all_reduce(found, group=self._group)
        return found

    def _own(self, values: Tensor, size: int, filling: int = 0) -> Tensor:
        padding = (0, 0) * (values.ndim - 1) + (0, size - len(values))
        return pad(values, padding, value=filling)[self._begin : self._end]

    def _tokens(self, samples: SampleRows) -> SampleRows:
        inside = (samples.row >= self._begin) & (samples.row < self._end)
        return replace(samples, row=(samples.row - self._begin) * inside, own=inside)


def _one(device: torch.device) -> TargetIndex:
    """A dummy prediction with weight zero, for a rank whose packed tokens predict nothing. The rank must take part in the
    backward pass, with a gradient for every parameter, or the other ranks would wait for it."""
    none, start = np.zeros(1, np.int64), np.array([0, 1])
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return TargetIndex(zero, torch.ones(1, device=device), zero, zero, zero, start, none)


class UlyssesPlan:
    """Attention over all packed tokens with this rank's share of the heads."""

    def __init__(self, inner: AttentionPlan, group: dist.ProcessGroup, rows: int) -> None:
        """`inner` attends over all packed tokens; `rows` is their number without padding."""
        self._inner, self._group, self._rows = inner, group, rows
        self._ranks = dist.get_world_size(group)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        heads = key.shape[0]
        if copies := lcm(heads, self._ranks) // heads - 1:  # fewer than ranks, or not a multiple of them
            key, value = (tensor.repeat_interleave(copies + 1, 0) for tensor in (key, value))
        query, key, value = (self._all_rows(tensor) for tensor in (query, key, value))
        out = self._inner.attend(module, query, key, value, scale)
        return self._all_heads(out)

    def _all_rows(self, tensor: Tensor) -> Tensor:
        """[heads, own rows, dim] → [own heads, rows, dim]"""
        heads, rows, dim = tensor.shape
        by_rank = tensor.transpose(0, 1).reshape(rows, self._ranks, heads // self._ranks, dim).transpose(0, 1)
        found = exchange(by_rank, self._group).flatten(0, 1)
        return found[: self._rows].transpose(0, 1)

    def _all_heads(self, tensor: Tensor) -> Tensor:
        """[rows, own heads, dim] → [own rows, heads, dim]"""
        _, heads, dim = tensor.shape
        padding = -self._rows % self._ranks
        by_rank = pad(tensor, (0, 0, 0, 0, 0, padding)).view(self._ranks, -1, heads, dim)
        return exchange(by_rank, self._group).transpose(0, 1).flatten(1, 2)


def exchange(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, …] → [ranks, …]: part r of the first dimension goes to rank r, and part r of the result comes from rank
    r."""
    found: Tensor = _Exchange.apply(tensor, group)  # type: ignore[no-untyped-call]
    return found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(tensor, group)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        return _exchanged(slopes[0], ctx.group), None


def _exchanged(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    tensor = tensor.contiguous()
    found = torch.empty_like(tensor)
    dist.all_to_all_single(found, tensor, group=group)
    return found


class _SumOfParts(torch.autograd.Function):
    """The sum over ranks, each of which has different elements and zeros elsewhere. All ranks compute the same loss from
    the result, so every rank already has the gradient of its own elements and the backward pass needs no
    communication."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        found = tensor.clone()
        dist.all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        return slopes[0], None
