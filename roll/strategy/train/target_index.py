"""Which tokens are predicted from which packed tokens: each distribution over the vocabulary, and each of its targets,
once.

A distribution is the hidden state of a packed token at a temperature; a pair is a target token of a distribution. Samples
of a group whose responses start with the same tokens need the same pair several times: its log-prob is computed once.

Example: the tokens 7, 8, 7 predicted from the packed tokens 4, 4, 4 at one temperature are one distribution and two
pairs, (0, 7) and (0, 8); `pair_of` is `[0 1 0]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from roll.data.remote_columns import Indices


@dataclass(frozen=True)
class TargetChunk:
    """Distributions `first:last` and their pairs."""

    first: int
    last: int
    first_pair: int
    last_pair: int


@dataclass(frozen=True)
class TargetIndex:
    rows: Tensor
    """[distributions] the packed token of each."""
    temperatures: Tensor
    """[distributions]"""
    sources: Tensor
    """[pairs] the distribution of each pair, non-decreasing."""
    targets: Tensor
    """[pairs] the token of each pair."""
    pair_of: Tensor
    """[tokens] the pair of each token."""
    pair_starts: Indices
    """[distributions + 1] on the host: distribution i has the pairs `pair_starts[i]:pair_starts[i + 1]`."""
    row_numbers: Indices
    """[distributions] on the host: `rows`, non-decreasing."""

    @classmethod
    def of(
        cls, rows: NDArray[Any], targets: NDArray[Any], temperatures: NDArray[Any], device: torch.device
    ) -> TargetIndex:
        """rows, targets, temperatures [tokens]"""
        levels, level = np.unique(temperatures, return_inverse=True)
        distinct, which = _distinct(rows.astype(np.int64) * len(levels) + level)
        span = int(targets.max(initial=0)) + 1
        pairs, pair_of = np.unique(which * span + targets, return_inverse=True)
        sources, row_numbers = pairs // span, distinct // max(len(levels), 1)
        return cls(
            rows=on_device(row_numbers, device),
            temperatures=on_device(levels[distinct % max(len(levels), 1)].astype(np.float32), device),
            sources=on_device(sources, device),
            targets=on_device(pairs % span, device),
            pair_of=on_device(pair_of, device),
            pair_starts=np.concatenate([[0], np.cumsum(np.bincount(sources, minlength=len(distinct)))]),
            row_numbers=row_numbers,
        )

    def __len__(self) -> int:
        return len(self.rows)

    def chunks(self, distributions: int) -> list[TargetChunk]:
        """All distributions in chunks of at most `distributions`."""
        found = []
        for first in range(0, len(self), distributions):
            last = min(first + distributions, len(self))
            found.append(TargetChunk(first, last, int(self.pair_starts[first]), int(self.pair_starts[last])))
        return found


def _distinct(numbers: Indices) -> tuple[Indices, Indices]:
    """The distinct ones among numbers from 0 on, ascending, and the index of each number among them. It needs no sorting,
    but memory for as many flags as the largest number."""
    present = np.zeros(int(numbers.max(initial=-1)) + 1, np.bool_)
    present[numbers] = True
    return np.flatnonzero(present), np.cumsum(present)[numbers] - 1


def on_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copies to the device without waiting."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
