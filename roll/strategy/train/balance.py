"""Assigns the samples of a batch to data-parallel ranks: equal work, with shared prefixes where that is cheaper.

A rank computes the prefix tree of its own samples, so the samples of a group cost least on one rank: their prompt is
computed once. But all ranks wait for the slowest, and a few long groups can make one rank slow. Three assignments are
compared, and the one whose slowest rank computes least is used:

- whole groups, the most expensive one first, each on the least loaded rank;
- adaptive: starting from that, the most expensive group of the slowest rank is halved, which computes its prompt twice,
  as long as that makes the slowest rank faster and that rank is more than 3 % above the mean;
- single samples, the most expensive one first.

Invariants: every sample is on exactly one rank; the slowest rank computes no more than with whole groups or with single
samples; the assignment depends only on the batch, the model's shape and the number of ranks, so every rank computes the
same one without communication.

Example: three groups of cost 4, 3 and 2 on two ranks are placed as {4} and {3, 2}. Halving 3 into 1.6 and 1.6 would give
{4, 1.6} and {2, 1.6}, which is slower, so they stay.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from roll.data.batch import Batch
from roll.data.remote_columns import Indices
from roll.data.tokenlog import IntArray, branches
from roll.model.shape import ModelShape
from roll.strategy.train.packing import common_prefixes, sorted_order

TOLERANCE = 0.03
"""How far the slowest rank may be above the mean before one of its groups is halved."""


@dataclass(frozen=True)
class TokenCost:
    """FLOP of a forward pass, in units of one token's matrix products."""

    pair: float
    """Cost of one token attending to one other."""

    @classmethod
    def of(cls, model: ModelShape) -> TokenCost:
        """Two FLOP per parameter and token; four per layer and query dimension of an attended pair."""
        return cls(4 * model.layers * model.queries / (2 * max(model.parameters, 1)))

    def of_tree(self, lengths: Indices, shared: Indices) -> float:
        """Cost of the prefix tree of sequences in lexicographic order: each distinct token once, each attending to its
        own prefix. `shared` is the length of the prefix that each has in common with the previous one."""
        rows = int((lengths - shared).sum())
        pairs = int((lengths * (lengths + 1) - shared * (shared + 1)).sum()) // 2
        return rows + self.pair * pairs


class Forest:
    """Computes the cost of the prefix tree of any subset of samples without reading their tokens again.

    All branches of all samples are sorted once. The common prefix of any two branches is the shortest common prefix of
    neighbours between them; `_shortest[k, i]` is that over the branch before i and the 2**k branches from i on.
    """

    def __init__(self, batch: Batch, cost: TokenCost) -> None:
        self._cost = cost
        sequences = _sequences(batch)
        flat = [branch for own in sequences for branch in own]
        order = sorted_order(flat)
        owner = np.repeat(np.arange(len(sequences)), [len(own) for own in sequences])
        self._branches: list[list[int]] = [[] for _ in sequences]
        """The indices of each sample's branches in lexicographic order, ascending."""
        for index, branch in enumerate(order):
            self._branches[owner[branch]].append(index)
        self._lengths = np.array([len(flat[branch]) for branch in order], np.int64)
        levels = [np.array([0, *common_prefixes([flat[branch] for branch in order])], np.int64)]
        while (step := 1 << (len(levels) - 1)) < len(order):
            levels.append(np.minimum(levels[-1], np.append(levels[-1][step:], np.zeros(step, np.int64))))
        self._shortest = np.stack(levels)

    def in_order(self, samples: Iterable[int]) -> tuple[int, ...]:
        """The samples in lexicographic order, each by its first branch."""
        return tuple(sorted(samples, key=lambda sample: self._branches[sample][0]))

    def cost(self, samples: Iterable[int]) -> float:
        indices = np.array(sorted(index for sample in samples for index in self._branches[sample]), np.int64)
        if not len(indices):
            return 0.0
        shared = np.zeros(len(indices), np.int64)
        shared[1:] = self._common(indices[:-1], indices[1:])
        return self._cost.of_tree(self._lengths[indices], shared)

    def _common(self, before: Indices, after: Indices) -> Indices:
        """The common prefix lengths of the branches at these indices: two overlapping runs of neighbours cover the range
        between."""
        level = np.frexp((after - before).astype(np.float64))[1] - 1  # exponent of the largest power of two within
        last = after + 1 - (1 << level)
        found: Indices = np.minimum(self._shortest[level, before + 1], self._shortest[level, last])
        return found


@dataclass(frozen=True)
class RankBalance:
    parts: list[Indices]
    """The samples of each rank, ascending."""
    loads: tuple[float, ...]
    """The cost of each rank's prefix tree, in units of one token's matrix products."""

    @property
    def imbalance(self) -> float:
        """How much longer the slowest rank computes than the mean: 0.1 means 10 % longer."""
        mean = sum(self.loads) / len(self.loads)
        return max(self.loads) / mean - 1 if mean else 0.0


@dataclass(frozen=True)
class _Unit:
    """Samples that stay together, in lexicographic order of their tokens."""

    cost: float
    samples: tuple[int, ...]


def balance(batch: Batch, ranks: int, model: ModelShape) -> RankBalance:
    """Assigns a batch's samples to data-parallel ranks. Samples without a token to train on cost nothing."""
    trained = batch.sum_tokens(batch.loss_mask) > 0
    forest = Forest(batch, TokenCost.of(model))
    groups = [np.flatnonzero((batch["group"] == group) & trained) for group in dict.fromkeys(batch["group"].tolist())]
    whole = [_unit(group.tolist(), forest) for group in groups if len(group)]
    single = [_unit([sample], forest) for sample in np.flatnonzero(trained).tolist()]
    options = (_assign(whole, ranks), _halved(whole, ranks, forest), _assign(single, ranks))
    parts = [[[sample for unit in own for sample in unit.samples] for own in option.units] for option in options]
    loads = [tuple(forest.cost(own) for own in option) for option in parts]  # units of one rank may share prefixes
    best = min(range(len(options)), key=lambda option: max(loads[option]))
    chosen = parts[best]
    chosen[0] += np.flatnonzero(~trained).tolist()
    return RankBalance([np.array(sorted(own), np.int64) for own in chosen], loads[best])


def _halved(units: list[_Unit], ranks: int, forest: Forest) -> _Assignment:
    """Starts with whole groups, and halves the most expensive one of the slowest rank as long as that helps."""
    best = assigned = _assign(units, ranks)
    failures = 0
    while failures <= ranks and (halves := _halves(assigned, forest)) is not None:
        costliest, both = halves
        units = [unit for unit in units if unit is not costliest] + both
        assigned = _assign(units, ranks)
        better = max(assigned.loads) < max(best.loads)
        best, failures = (assigned, 0) if better else (best, failures + 1)  # several ranks may be equally slow
    return best


@dataclass(frozen=True)
class _Assignment:
    units: list[list[_Unit]]
    loads: list[float]


def _assign(units: Sequence[_Unit], ranks: int) -> _Assignment:
    """The most expensive first, each on the least loaded rank; ties go by the first sample and the rank's number."""
    assigned: list[list[_Unit]] = [[] for _ in range(ranks)]
    heap = [(0.0, rank) for rank in range(ranks)]
    for unit in sorted(units, key=lambda unit: (-unit.cost, unit.samples)):
        load, rank = heapq.heappop(heap)
        assigned[rank].append(unit)
        heapq.heappush(heap, (load + unit.cost, rank))
    return _Assignment(assigned, [load for load, _ in sorted(heap, key=lambda item: item[1])])


def _halves(assigned: _Assignment, forest: Forest) -> tuple[_Unit, list[_Unit]] | None:
    """The most expensive unit of the slowest rank that can be halved, and its halves; None if the ranks are balanced."""
    slowest = max(range(len(assigned.loads)), key=lambda rank: assigned.loads[rank])
    mean = sum(assigned.loads) / len(assigned.loads)
    several = [unit for unit in assigned.units[slowest] if len(unit.samples) > 1]
    if assigned.loads[slowest] <= mean * (1 + TOLERANCE) or not several:
        return None
    costliest = max(several, key=lambda unit: (unit.cost, unit.samples))
    middle = len(costliest.samples) // 2
    halves = (costliest.samples[:middle], costliest.samples[middle:])
    return costliest, [_unit(half, forest) for half in halves]


def _unit(samples: Sequence[int], forest: Forest) -> _Unit:
    return _Unit(forest.cost(samples), forest.in_order(samples))


def _sequences(batch: Batch) -> list[list[IntArray]]:
    """The token ids of each sample's branches."""
    ids = batch.rows("ids")
    if "turn" not in batch:
        return [[sequence] for sequence in ids]
    spans = [branches(turn) for turn in batch.rows("turn")]
    return [[sequence[span] for span in own] for sequence, own in zip(ids, spans, strict=True)]
