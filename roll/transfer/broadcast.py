"""One process group for weights, beside any other: rank 0 sends, all others receive.

What always holds: torch's default process group is neither needed nor touched; every wait ends within the deadline, by an
error that says who waited for whom; after an error the group is of no more use, and is closed and made anew.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from roll.cluster.network import host_address, own_address
from roll.config.errors import RunError

BroadcastBackend: TypeAlias = Literal["gloo", "nccl"]


class _Group(Protocol):
    def broadcast(self, tensor: Tensor, root: int) -> dist.Work: ...

    def abort(self) -> None: ...


class BroadcastGroup:
    """Made on every rank at about the same time: the constructor returns once all have joined.

    Rank 0 names a host and a free port of its machine to the others beforehand, and listens there.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        address: str,
        port: int,
        backend: BroadcastBackend,
        deadline_s: float,
        device: torch.device | None = None,
    ) -> None:
        self.rank = rank
        self.device = device or torch.device("cpu")
        """Where the tensors to broadcast lie."""
        self._name = f"the broadcast group at {address}:{port} (rank {rank} of {world_size}, {backend})"
        self._deadline = timedelta(seconds=deadline_s)
        if backend == "nccl" and not dist.is_nccl_available():
            raise RunError("this build of torch has no NCCL: broadcast with gloo, or install torch for CUDA")
        try:
            store = TCPStore(address, port, world_size, is_master=rank == 0, timeout=self._deadline)
            self._group: _Group | None = _group(backend, store, rank, world_size, self._deadline, address)
        except (RuntimeError, OSError) as error:
            raise RunError(
                f"{self._name} did not form within {deadline_s:g} s: check that all {world_size} ranks live and reach "
                f"that address ({_first_line(error)})"
            ) from error

    @staticmethod
    def free_port() -> int:
        """A port nobody listened on a moment ago."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    @staticmethod
    def host() -> str:
        """The address other machines reach this one at; 127.0.0.1 on a machine without a network."""
        return host_address()

    def broadcast(self, tensor: Tensor) -> None:
        """Makes every rank's tensor, flat uint8 and of one length everywhere, that of rank 0."""
        if self._group is None:
            raise RunError(f"{self._name} is closed: make a new one")
        try:
            self._group.broadcast(tensor, 0).wait(self._deadline)
        except RuntimeError as error:
            who = "a receiver" if self.rank == 0 else "the sender or a rank before this one"
            raise RunError(
                f"{self._name} broke: {who} died, or took longer than {self._deadline.total_seconds():g} s "
                f"({_first_line(error)})"
            ) from error

    def close(self) -> None:
        """Lets go of the connections, without waiting for the others."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()


def _group(
    backend: BroadcastBackend, store: TCPStore, rank: int, world_size: int, deadline: timedelta, address: str
) -> _Group:
    options: Any
    group: Any
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = deadline
        group = dist.ProcessGroupNCCL(store, rank, world_size, options)
    else:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = deadline
        options._threads = 1
        # The interface that reaches rank 0 also reaches the others; the machine's name may resolve to a loopback address.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(address))]
        group = dist.ProcessGroupGloo(store, rank, world_size, options)
    return group  # type: ignore[no-any-return]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
