"""The ranks of a sharded trainer: how they meet, and what they tell each other.

What always holds: the ranks of one group live and die together. When one is lost, the controller ends all of them and new
processes meet at a new store; no process joins a group twice. Every wait for other ranks ends after the deadline.

The mesh has the dimensions of `MeshShape`. Ranks that differ in `context` or `tensor` alone compute the same samples:
what is summed or gathered over samples counts one of them.
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
    """Where the ranks of a new group find each other: a store that the first rank keeps."""

    address: str
    port: int
    deadline_s: float


def open_store(address: str, deadline_s: float) -> tuple[TCPStore, RankRendezvous]:
    """The first rank's store, listening on a free port. Keep it as long as the group lives."""
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=deadline_s))
    return store, RankRendezvous(address, int(store.port), deadline_s)


class RankGroup:
    """This process as one rank of the group, which is torch's default group in it."""

    def __init__(
        self, rank: int, shape: MeshShape, rendezvous: RankRendezvous, device: torch.device, store: TCPStore | None = None
    ) -> None:
        """Returns once all ranks have come. The first rank gives the store it has opened."""
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
                # one of gloo, but there only on the ranks outside of it: they would wait for the others for ever.
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                store=own,
                rank=rank,
                world_size=shape.ranks,
                timeout=deadline,
            )
            self.most(0)  # NCCL connects with the first message: here its failure is said in a sentence
        except (RuntimeError, OSError) as error:
            first = str(error).strip().partition("\n")[0]
            raise RunError(
                f"rank {rank} of {shape.ranks} did not meet the others at {rendezvous.address}:{rendezvous.port} within "
                f"{rendezvous.deadline_s:g} s: check that all ranks live and reach that address ({first})"
            ) from error
        self.meshes = Meshes(shape, device.type)

    @property
    def ranks(self) -> int:
        return self.shape.ranks

    @property
    def mesh(self) -> DeviceMesh:
        """Over which FSDP cuts parameters that are no expert's."""
        return self.meshes.cuts

    @property
    def data_rank(self) -> int:
        """Which part of the samples this rank computes."""
        return self.shape.data_rank(self.rank)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def replica(self) -> int:
        """Which copy of the weights this rank has a shard of."""
        return self.rank // self.shape.copy

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the parts of the samples, in place."""
        dist.all_reduce(tensor, group=self.meshes.data)
        return tensor

    def sum_rows(self, tensor: Tensor) -> Tensor:
        """The sum over the parts of the samples and over the ranks that have the rows of each, in place."""
        if self.meshes.context is not None:
            dist.all_reduce(tensor, group=self.meshes.context)
        return self.sum(tensor)

    def most(self, value: int) -> int:
        """The largest of all ranks' values."""
        found = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def least(self, value: int) -> int:
        """The smallest of all ranks' values."""
        return -self.most(-value)

    def gathered(self, value: T) -> list[T]:
        """The value of each part of the samples, in order. For small things on rare paths: it pickles."""
        values: list[Any] = [None] * self.shape.data
        dist.all_gather_object(values, value, group=self.meshes.data)
        return values

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _choose_interface(address: str) -> None:
    """gloo listens where the machine's name resolves to, which may be a loopback address that other nodes do not reach:
    the interface that reaches the store also reaches the other ranks. What the user has chosen counts."""
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface_of(own_address(address))) is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name


class Meshes:
    """The process groups of a mesh, as torch's device meshes."""

    def __init__(self, shape: MeshShape, device_type: str) -> None:
        """A collective call. A single replica gets no dimension `replicate`: FSDP would reduce gradients over it in
        vain."""
        cuts: dict[str, int] = {"replicate": shape.replicate} if shape.replicate > 1 else {}
        cuts["shard"] = shape.cuts
        dense = _mesh(device_type, {**cuts, "tensor": shape.tensor} if shape.tensor > 1 else cuts)
        self.cuts: DeviceMesh = dense[tuple(cuts)] if shape.tensor > 1 else dense
        """Over which FSDP cuts parameters that are no expert's."""
        self.tensor: DeviceMesh | None = dense["tensor"] if shape.tensor > 1 else None
        self.expert: DeviceMesh | None = None
        self.expert_cuts: DeviceMesh = self.cuts
        """Over which FSDP cuts experts' parameters."""
        if shape.expert * shape.tensor > 1:
            cuts["shard"] = shape.expert_cuts
            experts = _mesh(device_type, {**cuts, "expert": shape.expert})
            self.expert, self.expert_cuts = experts["expert"] if shape.expert > 1 else None, experts[tuple(cuts)]
        self.data: dist.ProcessGroup | None = None
        """Of the ranks that have each part of the samples once; None is the group of all ranks."""
        self.context: dist.ProcessGroup | None = None
        """Of the ranks that hold the rows of the same samples."""
        if shape.context * shape.tensor > 1:
            rows = _mesh(device_type, {"data": shape.data, "context": shape.context, "tensor": shape.tensor})
            self.data = rows.get_group("data")
            self.context = rows.get_group("context") if shape.context > 1 else None


def _mesh(device_type: str, dimensions: dict[str, int]) -> DeviceMesh:
    return init_device_mesh(device_type, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
