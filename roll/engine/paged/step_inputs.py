"""The inputs of a step: one row per token, the unit of a forward pass.

A row has its slot, its position, its token (or a marker for the last token its slot sampled), the cache position of its
keys and values, whether and how a token is sampled after it, and the blocks of the positions before it. All rows are
columns of one int32 table, so a step's inputs are one copy to the device. The device keeps only the KV cache and every
slot's last token between steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SLOT, POSITION, TOKEN, CACHE_POSITION, SAMPLES, SEED_LOW, SEED_HIGH, TEMPERATURE = range(8)
HEADER = 8
"""Lines of the table before the block table."""
LAST_SAMPLED = -1
"""Value of TOKEN that stands for the last token its slot sampled."""

InputTable = NDArray[np.int32]
"""[HEADER + blocks, rows]"""


@dataclass(frozen=True)
class StepInputs:
    """The table on its device."""

    data: Tensor

    @property
    def count(self) -> int:
        return self.data.shape[1]

    def part(self, start: int, end: int) -> StepInputs:
        return StepInputs(self.data[:, start:end])

    @property
    def slots(self) -> Tensor:
        return self.data[SLOT]

    @property
    def positions(self) -> Tensor:
        return self.data[POSITION]

    @property
    def tokens(self) -> Tensor:
        return self.data[TOKEN]

    @property
    def cache_positions(self) -> Tensor:
        """Cache position: block · BLOCK + offset."""
        return self.data[CACHE_POSITION]

    @property
    def samples(self) -> Tensor:
        return self.data[SAMPLES]

    @property
    def seeds_low(self) -> Tensor:
        return self.data[SEED_LOW]

    @property
    def seeds_high(self) -> Tensor:
        return self.data[SEED_HIGH]

    @property
    def temperatures(self) -> Tensor:
        return self.data[TEMPERATURE].view(torch.float32)

    @property
    def block_table(self) -> Tensor:
        """Block table [blocks, rows]: line i is the block of positions i · BLOCK to (i + 1) · BLOCK - 1."""
        return self.data[HEADER:]

    def ids(self, last: Tensor) -> Tensor:
        """The rows' tokens; `last` has every slot's last sampled token."""
        return torch.where(self.tokens < 0, last[self.slots.long()], self.tokens).long()


def padding(table: InputTable, count: int, slot: int) -> InputTable:
    """Pads the inputs to `count` rows. Padding rows belong to no sequence: they write to block 0 and sample nothing."""
    missing = count - table.shape[1]
    if not missing:
        return table
    filler = np.zeros((table.shape[0], missing), np.int32)
    filler[SLOT] = slot
    return np.concatenate([table, filler], axis=1)
