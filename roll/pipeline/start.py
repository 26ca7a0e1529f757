"""What the workers of a role do after they were started or restarted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from roll.cluster import Cluster, RestartPolicy, Supervisor, Worker
from roll.config.schema import FaultToleranceConfig
from roll.devices.residency import ResidencyTable
from roll.pipeline.executors import MIN_HANG_S
from roll.strategy.offload import Residency
from roll.workers.rank_group import GroupWorker, join_ranks

W = TypeVar("W", bound=Worker)
G = TypeVar("G", bound=GroupWorker)


async def offload_at_start(
    cluster: Cluster[W], set_residency: Callable[[W, Residency], Any], residency: ResidencyTable
) -> Cluster[W]:
    """Offloads the workers to their lowest residency, to make space for others that start on the same devices."""
    levels = [residency.lowest(cluster.role, placement.rank) for placement in cluster.placements]
    moves = [(rank, level) for rank, level in enumerate(levels) if level != "all"]
    await asyncio.gather(*(cluster.call_rank(rank, set_residency, level) for rank, level in moves))
    return cluster


async def join_and_offload(
    cluster: Cluster[G],
    set_residency: Callable[[G, Residency], Any],
    residency: ResidencyTable,
    fault_tolerance: FaultToleranceConfig,
) -> Cluster[G]:
    """Joins the ranks of a sharded role, which then load their model, and offloads them to make space for other roles."""
    async with ending_dead_workers(fault_tolerance, cluster):
        return await offload_at_start(await join_ranks(cluster), set_residency, residency)


@asynccontextmanager
async def ending_dead_workers(
    fault_tolerance: FaultToleranceConfig, *clusters: Cluster[Any] | None
) -> AsyncIterator[None]:
    """While the block runs, a worker that dies or hangs is ended, a rank together with its group: its callers get the
    error long before the deadline of the call."""
    supervisor = Supervisor(RestartPolicy(fault_tolerance.ping_s, max(fault_tolerance.hang_s, MIN_HANG_S)))
    for cluster in clusters:
        if cluster is not None and not cluster.in_process:
            supervisor.watch(cluster, _ending(supervisor, cluster), _nothing, restart=False)
    try:
        yield
    finally:
        await supervisor.close()


def _ending(supervisor: Supervisor, cluster: Cluster[Any]) -> Callable[[int, str], None]:
    def lost(rank: int, why: str) -> None:
        if not cluster.is_group:  # the supervisor ends the ranks of a group itself
            supervisor.spawn(cluster.end(rank))

    return lost


async def _nothing(rank: int) -> None:
    """The code that started the worker restarts it."""
