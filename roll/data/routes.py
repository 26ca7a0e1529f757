"""Routes: the experts of a mixture-of-experts model that each token was routed to when its response was sampled.

One row per token, [tokens, layers · chosen], of the smallest type that can represent all experts and one more number,
`unrecorded_value`, which means that nothing was recorded. A model without experts has rows of width 0.

Example: 2 layers with 8 experts each, of which 2 are chosen, give rows of 4 bytes; [3, 5, 0, 7] means experts 3 and 5 in
the first layer, 0 and 7 in the second; [255, 255, 255, 255] means that nothing was recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Routes = NDArray[np.uint8] | NDArray[np.uint16]

NO_ROUTES: Routes = np.zeros((0, 0), np.uint8)


def routes_type(experts: int) -> np.dtype[Any]:
    """The type of a row's numbers, for layers with this many experts."""
    return np.dtype(np.uint8 if experts < np.iinfo(np.uint8).max else np.uint16)


def unrecorded_value(routes: Routes) -> int:
    """The number that means that nothing was recorded."""
    return int(np.iinfo(routes.dtype).max)


def unrecorded_rows(tokens: int, like: Routes) -> Routes:
    """Rows for tokens whose experts were not recorded."""
    return np.full((tokens, like.shape[1]), unrecorded_value(like), like.dtype)


def to_signed(routes: Routes) -> NDArray[np.int16]:
    """The same with -1 where nothing was recorded."""
    return np.where(routes == unrecorded_value(routes), np.int16(-1), routes.astype(np.int16))


def to_common_width(parts: Sequence[Routes]) -> list[Routes]:
    """Rows of several logs, all of one width: a log without routes gets unrecorded rows."""
    like = next((part for part in parts if part.shape[1]), None)
    if like is None:
        return list(parts)
    return [part if part.shape[1] else unrecorded_rows(len(part), like) for part in parts]
