"""Workers whose model may be spread over the ranks of their role: then all ranks meet before it is loaded.

    rendezvous = open_group()        the first rank opens a store
    join_group(rendezvous)           every rank comes to it, and builds its part

What always holds: no process joins a group twice; after a loss all ranks are new processes, which meet at a new store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from roll.cluster import Cluster, Dispatch, WorkerPlacement, dispatch
from roll.workers.device import DeviceWorker

if TYPE_CHECKING:  # those who only call such a worker do without torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from roll.strategy.train.sharded.process_group import RankGroup, RankRendezvous


class GroupWorker(DeviceWorker):
    def __init__(self, place: WorkerPlacement, deterministic: bool) -> None:
        """A subclass sets what `build` needs first: a worker that is no rank of a mesh builds its strategy here."""
        super().__init__(place, deterministic)
        self._store: TCPStore | None = None
        self.rendezvous: RankRendezvous | None = None
        """Where the ranks have met."""
        if place.mesh is None:
            self.build(None)

    def build(self, group: RankGroup | None) -> None:
        """Makes the worker's strategy, over the ranks of a group or in this process alone."""
        raise NotImplementedError

    @property
    def is_first(self) -> bool:
        """Whether this worker speaks for its role: the only one, or the first rank of a mesh."""
        return self.place.mesh is None or self.place.rank == 0

    @dispatch(Dispatch.ONE)
    def open_group(self, deadline_s: float) -> RankRendezvous:
        """Where the ranks will meet, at this one."""
        from roll.strategy.train.sharded.process_group import open_store
        from roll.weight_sync.broadcast import BroadcastGroup

        self._store, rendezvous = open_store(BroadcastGroup.host(), deadline_s)
        return rendezvous

    @dispatch(Dispatch.ALL)
    def join_group(self, rendezvous: RankRendezvous) -> None:
        """Meets the other ranks and builds this one's part of the model."""
        import torch

        from roll.strategy.train.sharded.process_group import RankGroup

        assert self.place.mesh is not None, "only the ranks of a mesh meet"
        device = torch.device(self.place.device)
        self.rendezvous = rendezvous
        self.build(RankGroup(self.place.rank, self.place.mesh, rendezvous, device, self._store))


W = TypeVar("W", bound=GroupWorker)


async def meet(cluster: Cluster[W]) -> Cluster[W]:
    """Has the ranks of a role meet and load their model, if it is one that is spread over ranks."""
    if cluster.is_group:
        rendezvous = await cluster.call_rank(0, GroupWorker.open_group, cluster.deadline_s)
        await cluster.call_each(GroupWorker.join_group, rendezvous)
    return cluster
