"""Workers whose model may be sharded over the ranks of their role: then all ranks join a process group before loading.

    rendezvous = open_group()        rank 0 opens a store
    join_group(rendezvous)           every rank connects to it and builds its part of the model

Invariants: no process joins a group twice; after a failure all ranks are new processes with a new store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from roll.cluster import Cluster, Dispatch, WorkerPlacement, dispatch
from roll.workers.device import DeviceWorker

if TYPE_CHECKING:  # processes that only call such a worker do not import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from roll.strategy.train.sharded.process_group import RankGroup, RankRendezvous


class GroupWorker(DeviceWorker):
    def __init__(self, placement: WorkerPlacement, deterministic: bool) -> None:
        """A subclass must set the attributes that `build` needs before it calls this: a worker that is no rank of a mesh
        builds its strategy here."""
        super().__init__(placement, deterministic)
        self._store: TCPStore | None = None
        self.rendezvous: RankRendezvous | None = None
        """The rendezvous of the ranks' process group."""
        if placement.mesh is None:
            self.build(None)

    def build(self, group: RankGroup | None) -> None:
        """Creates the worker's Parallel Strategy, over the ranks of a group or in this process alone."""
        raise NotImplementedError

    @property
    def is_first(self) -> bool:
        """Whether this worker acts for its role: it is no rank of a mesh, or rank 0."""
        return self.placement.mesh is None or self.placement.rank == 0

    @dispatch(Dispatch.ONE)
    def open_group(self, deadline_s: float) -> RankRendezvous:
        """Opens the store on this rank and returns the rendezvous."""
        from roll.strategy.train.sharded.process_group import open_store
        from roll.weight_sync.broadcast import BroadcastGroup

        self._store, rendezvous = open_store(BroadcastGroup.host(), deadline_s)
        return rendezvous

    @dispatch(Dispatch.ALL)
    def join_group(self, rendezvous: RankRendezvous) -> None:
        """Joins the process group and builds this rank's part of the model."""
        import torch

        from roll.strategy.train.sharded.process_group import RankGroup

        assert self.placement.mesh is not None, "only the ranks of a mesh join a process group"
        device = torch.device(self.placement.device)
        self.rendezvous = rendezvous
        self.build(RankGroup(self.placement.rank, self.placement.mesh, rendezvous, device, self._store))


W = TypeVar("W", bound=GroupWorker)


async def join_ranks(cluster: Cluster[W]) -> Cluster[W]:
    """Has the ranks of a role join their process group and load the model; does nothing if the workers are no group."""
    if cluster.is_group:
        rendezvous = await cluster.call_rank(0, GroupWorker.open_group, cluster.deadline_s)
        await cluster.call_each(GroupWorker.join_group, rendezvous)
    return cluster
