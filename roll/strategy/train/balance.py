"""Which data rank trains which samples of a batch: equal work, with prefixes shared where that is cheaper.

A rank computes the prefix tree of its own samples, so the samples of a group cost least on one rank: their prompt is
computed once. But one rank waits for the slowest, and a few long groups can make one rank slow. So groups are placed
whole at first, the most expensive one first, each on the least loaded rank; then the most expensive group of the slowest
rank is halved, which computes its prompt twice, as long as that makes the slowest rank faster and that rank is more than
3 % above the mean.

What always holds: every sample is on exactly one rank; the assignment depends on the batch, the model's shape and the
number of ranks alone, so every rank computes the same one without asking the others.

Example: three groups of cost 4, 3 and 2 on two ranks are placed as {4} and {3, 2}. Halving 3 into 1.6 and 1.6 would give
{4, 1.6} and {2, 1.6}, which is slower, so they stay.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roll.data.batch import Batch
from roll.data.columns import Indices
from roll.data.tokenlog import IntArray, branches, common_prefix
from roll.model.shape import ModelShape
from roll.strategy.train.packing import sorted_order

TOLERANCE = 0.03
"""How far the slowest rank may be above the mean without a group being halved for it."""


@dataclass(frozen=True)
class TokenCost:
    """FLOP of a forward pass, in units of one token's matrix products."""

    pair: float
    """Of one token that attends to one other."""

    @classmethod
    def of(cls, model: ModelShape) -> TokenCost:
        """Two FLOP per parameter and token; four per layer and query dimension of an attended pair."""
        return cls(4 * model.layers * model.queries / (2 * max(model.parameters, 1)))

    def of_tree(self, sequences: Sequence[IntArray]) -> float:
        """Of the prefix tree of sequences in lexicographic order: each distinct token once, each with its own prefix."""
        rows, pairs, before = 0, 0, np.zeros(0, np.int32)
        for sequence in sequences:
            shared, length = common_prefix(before, sequence), len(sequence)
            rows += length - shared
            pairs += (length * (length + 1) - shared * (shared + 1)) // 2
            before = sequence
        return rows + self.pair * pairs


@dataclass(frozen=True)
class Balance:
    parts: list[Indices]
    """The samples of each rank, ascending."""
    loads: tuple[float, ...]
    """What each rank computes, in units of one token's matrix products."""

    @property
    def imbalance(self) -> float:
        """How much longer the slowest rank computes than the mean: 0.1 is a tenth longer."""
        mean = sum(self.loads) / len(self.loads)
        return max(self.loads) / mean - 1 if mean else 0.0


@dataclass(frozen=True)
class _Unit:
    """Samples that stay together: their indices and branches in lexicographic order of their tokens."""

    cost: float
    samples: tuple[int, ...]


def balance(batch: Batch, ranks: int, model: ModelShape) -> Balance:
    """The assignment of a batch's samples to data ranks. Samples without a token to train on cost nothing."""
    cost, sequences = TokenCost.of(model), _sequences(batch)
    trained = batch.sum_tokens(batch.loss_mask) > 0
    idle = np.flatnonzero(~trained)
    groups = [np.flatnonzero((batch["group"] == group) & trained) for group in dict.fromkeys(batch["group"].tolist())]
    units = [_unit(group, sequences, cost) for group in groups if len(group)]
    best = placed = _place(units, ranks)
    failures = 0
    while failures <= ranks and (halves := _halves(placed, sequences, cost)) is not None:
        dearest, both = halves
        units = [unit for unit in units if unit is not dearest] + both
        placed = _place(units, ranks)
        better = max(placed.loads) < max(best.loads)
        best, failures = (placed, 0) if better else (best, failures + 1)  # several ranks may be equally slow
    parts = [sorted(sample for unit in units for sample in unit.samples) for units in best.units]
    parts[0] = sorted([*parts[0], *idle.tolist()])
    return Balance([np.array(part, np.int64) for part in parts], tuple(best.loads))


@dataclass(frozen=True)
class _Placed:
    units: list[list[_Unit]]
    loads: list[float]


def _place(units: Sequence[_Unit], ranks: int) -> _Placed:
    """The most expensive first, each on the least loaded rank; ties go by the first sample and the rank's number."""
    placed: list[list[_Unit]] = [[] for _ in range(ranks)]
    heap = [(0.0, rank) for rank in range(ranks)]
    for unit in sorted(units, key=lambda unit: (-unit.cost, unit.samples)):
        load, rank = heapq.heappop(heap)
        placed[rank].append(unit)
        heapq.heappush(heap, (load + unit.cost, rank))
    return _Placed(placed, [load for load, _ in sorted(heap, key=lambda item: item[1])])


def _halves(placed: _Placed, sequences: list[list[IntArray]], cost: TokenCost) -> tuple[_Unit, list[_Unit]] | None:
    """The most expensive unit of the slowest rank that can be halved, and its halves; None where ranks are even."""
    slowest = max(range(len(placed.loads)), key=lambda rank: placed.loads[rank])
    mean = sum(placed.loads) / len(placed.loads)
    several = [unit for unit in placed.units[slowest] if len(unit.samples) > 1]
    if placed.loads[slowest] <= mean * (1 + TOLERANCE) or not several:
        return None
    dearest = max(several, key=lambda unit: (unit.cost, unit.samples))
    middle = len(dearest.samples) // 2
    halves = (dearest.samples[:middle], dearest.samples[middle:])
    return dearest, [_unit(np.array(half), sequences, cost) for half in halves]


def _unit(samples: Indices, sequences: list[list[IntArray]], cost: TokenCost) -> _Unit:
    order = [int(samples[i]) for i in sorted_order([sequences[sample][0] for sample in samples])]
    own = [sequence for sample in order for sequence in sequences[sample]]
    return _Unit(cost.of_tree([own[i] for i in sorted_order(own)]), tuple(order))


def _sequences(batch: Batch) -> list[list[IntArray]]:
    """The token ids of each sample's branches."""
    ids = batch.rows("ids")
    if "turn" not in batch:
        return [[sequence] for sequence in ids]
    spans = [branches(turn) for turn in batch.rows("turn")]
    return [[sequence[span] for span in own] for sequence, own in zip(ids, spans, strict=True)]
