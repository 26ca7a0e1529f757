"""Making room while roles start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from roll.cluster import Cluster, Worker
from roll.devices.stages import StageTable
from roll.strategy.shelf import Level

W = TypeVar("W", bound=Worker)


async def aside(cluster: Cluster[W], hold: Callable[[W, Level], Any], stages: StageTable) -> Cluster[W]:
    """Makes room for the others that are to start on the same devices."""
    levels = [stages.lowest(cluster.role, place.rank) for place in cluster.places]
    moves = [(rank, level) for rank, level in enumerate(levels) if level != "all"]
    await asyncio.gather(*(cluster.call_rank(rank, hold, level) for rank, level in moves))
    return cluster
