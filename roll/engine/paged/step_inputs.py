"""Rows: one token each, the unit of a forward pass.

A row says which slot it belongs to, its position, its token (or that its slot's last drawn token is meant), where its
keys and values go, whether a token is drawn after it and how, and which blocks hold the positions before it. All of it
stands in one table of 32-bit numbers with a column a row, so that a step's inputs are one copy to the device; the device
itself remembers only the cache and every slot's last token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SLOT, POSITION, TOKEN, PLACE, DRAWS, SEED_LOW, SEED_HIGH, TEMPERATURE = range(8)
HEADER = 8
"""Lines of the table before the blocks."""
LAST_DRAWN = -1
"""As a row's token: the one its slot drew last."""

Sheet = NDArray[np.int32]
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
    def places(self) -> Tensor:
        """Where in the cache: block · size + offset."""
        return self.data[PLACE]

    @property
    def draws(self) -> Tensor:
        return self.data[DRAWS]

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
    def table(self) -> Tensor:
        """[blocks, rows]: line i holds the block of positions i · size and on."""
        return self.data[HEADER:]

    def ids(self, last: Tensor) -> Tensor:
        """The rows' tokens; `last` holds every slot's last one."""
        return torch.where(self.tokens < 0, last[self.slots.long()], self.tokens).long()


def padding(sheet: Sheet, count: int, slot: int) -> Sheet:
    """The sheet with rows added up to `count` that belong to nobody's slot: they write into block 0, and draw nothing."""
    missing = count - sheet.shape[1]
    if not missing:
        return sheet
    filler = np.zeros((sheet.shape[0], missing), np.int32)
    filler[SLOT] = slot
    return np.concatenate([sheet, filler], axis=1)
