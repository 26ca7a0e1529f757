"""The process group of a sharded trainer's ranks: rendezvous and collectives.

Invariants: the ranks of one group live and die together. If one dies, the controller ends all of them and new processes
meet at a new store; no process joins a group twice. Every wait for other ranks ends after the deadline.

The mesh has the dimensions of `MeshShape`. Ranks that differ only in `context` or `tensor` compute the same samples; sums
and gathers over samples count one of them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from roll.cluster.mesh import MeshShape
from roll.cluster.network import interface_of, own_address
from roll.config.errors import RunError

T = TypeVar("T")


@dataclass(frozen=True)
class RankRendezvous:
    """Where the ranks of a new group meet: the address of a store that the first rank runs."""

    address: str
    port: int
    deadline_s: float


def open_store(address: str, deadline_s: float) -> tuple[TCPStore, RankRendezvous]:
    """The first rank's store, listening on a free port. It must live as long as the group."""
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=deadline_s))
    return store, RankRendezvous(address, int(store.port), deadline_s)


class RankGroup:
    """This process as one rank of the group, which is torch's default process group."""

    def __init__(
        self, rank: int, shape: MeshShape, rendezvous: RankRendezvous, device: torch.device, store: TCPStore | None = None
    ) -> None:
        """Returns once all ranks have joined. The first rank passes the store it has opened."""
        self.rank, self.shape, self.device = rank, shape, device
        deadline = timedelta(seconds=rendezvous.deadline_s)
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(device)
        _choose_interface(rendezvous.address)
        try:
            own = store or TCPStore(rendezvous.address, rendezvous.port, is_master=False, timeout=deadline)
            dist.init_process_group(
                # With a device bound to it (`device_id`), torch splits NCCL's communicator for every smaller group, also
                # for a gloo group, but then only on the ranks outside of it: they would wait for the others forever.
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                store=own,
                rank=rank,
                world_size=shape.ranks,
                timeout=deadline,
            )
            self.most(0)  # NCCL connects at the first collective: a failure here gets a clear message
        except (RuntimeError, OSError) as error:
            first = str(error).strip().partition("\n")[0]
            raise RunError(
                f"rank {rank} of {shape.ranks} did not join the others at {rendezvous.address}:{rendezvous.port} within "
                f"{rendezvous.deadline_s:g} s: check that all ranks live and reach that address ({first})"
            ) from error
        self.meshes = Meshes(shape, device.type)

    @property
    def ranks(self) -> int:
        return self.shape.ranks

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh over which FSDP shards all parameters except experts."""
        return self.meshes.cuts

    @property
    def data_rank(self) -> int:
        """Index of the part of the samples that this rank computes."""
        return self.shape.data_rank(self.rank)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def replica(self) -> int:
        """Index of the copy of the weights that this rank has a shard of."""
        return self.rank // self.shape.copy

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the data-parallel parts, in place."""
        dist.all_reduce(tensor, group=self.meshes.data)
        return tensor

    def sum_rows(self, tensor: Tensor) -> Tensor:
        """The sum over the data-parallel parts and over the ranks that share the packed tokens of each, in place."""
        if self.meshes.context is not None:
            dist.all_reduce(tensor, group=self.meshes.context)
        return self.sum(tensor)

    def most(self, value: int) -> int:
        """The maximum of `value` over all ranks."""
        found = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def least(self, value: int) -> int:
        """The minimum of `value` over all ranks."""
        return -self.most(-value)

    def gathered(self, value: T) -> list[T]:
        """The value of each data-parallel part, in order. It pickles: only for small objects on rare paths."""
        values: list[Any] = [None] * self.shape.data
        dist.all_gather_object(values, value, group=self.meshes.data)
        return values

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _choose_interface(address: str) -> None:
    """Chooses the network interface of gloo. By default gloo listens on the address that the host name resolves to, which
    may be a loopback address that other nodes cannot reach. The interface that reaches the store also reaches the other
    ranks. A value set by the user is kept."""
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface_of(own_address(address))) is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name


class Meshes:
    """The process groups of a mesh, as torch's device meshes."""

    def __init__(self, shape: MeshShape, device_type: str) -> None:
        """A collective call. With a single replica there is no dimension `replicate`, over which FSDP would reduce
        gradients for nothing."""
        cuts: dict[str, int] = {"replicate": shape.replicate} if shape.replicate > 1 else {}
        cuts["shard"] = shape.cuts
        dense = _mesh(device_type, {**cuts, "tensor": shape.tensor} if shape.tensor > 1 else cuts)
        self.cuts: DeviceMesh = dense[tuple(cuts)] if shape.tensor > 1 else dense
        """The mesh over which FSDP shards all parameters except experts."""
        self.tensor: DeviceMesh | None = dense["tensor"] if shape.tensor > 1 else None
        self.expert: DeviceMesh | None = None
        self.expert_cuts: DeviceMesh = self.cuts
        """The mesh over which FSDP shards the experts' parameters."""
        if shape.expert * shape.tensor > 1:
            cuts["shard"] = shape.expert_cuts
            experts = _mesh(device_type, {**cuts, "expert": shape.expert})
            self.expert, self.expert_cuts = experts["expert"] if shape.expert > 1 else None, experts[tuple(cuts)]
        self.data: dist.ProcessGroup | None = None
        """The group of ranks that together have each part of the samples once; None is the group of all ranks."""
        self.context: dist.ProcessGroup | None = None
        """The group of ranks that share the packed tokens of the same samples."""
        if shape.context * shape.tensor > 1:
            rows = _mesh(device_type, {"data": shape.data, "context": shape.context, "tensor": shape.tensor})
            self.data = rows.get_group("data")
            self.context = rows.get_group("context") if shape.context > 1 else None


def _mesh(device_type: str, dimensions: dict[str, int]) -> DeviceMesh:
    return init_device_mesh(device_type, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
