"""A separate process group for weight sync: rank 0 broadcasts, all other ranks receive.

Invariants: torch's default process group is neither needed nor changed; every wait ends within the deadline, with a
`GroupBroke` that says which side waited for which, or within a second after another thread cancels and closes the group;
after an error the group cannot be used again: close it and create a new one.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from roll.cluster.network import host_address, own_address
from roll.config.errors import RunError

BroadcastBackend: TypeAlias = Literal["gloo", "nccl"]

_POLL_S = 0.5
"""Interval at which a wait checks whether the group was cancelled."""
_RENDEZVOUS_POLL_S = 0.01
"""Interval at which a rank checks whether all ranks have reached the store."""
_CONNECT_S = 30.0
"""Deadline for the ranks to connect to each other once all have reached the store."""


class GroupBroke(RunError):
    """A rank died, missed the deadline or left: the group must be created again."""


class _Group(Protocol):
    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> dist.Work: ...

    def abort(self) -> None: ...


class BroadcastGroup:
    """Create it on every rank at about the same time: the constructor returns once all ranks have joined.

    All ranks must know a host and a free port of rank 0, which listens there. Setting `cancelled` ends every wait of this
    rank: gloo itself would wait for a powered-off machine until the deadline.
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
        cancelled: threading.Event | None = None,
    ) -> None:
        self.rank = rank
        self._backend = backend
        self._cancelled = cancelled or threading.Event()
        self.device = device or torch.device("cpu")
        """Device of the tensors to broadcast."""
        self._name = f"the broadcast group at {address}:{port} (rank {rank} of {world_size}, {backend})"
        self._deadline = timedelta(seconds=deadline_s)
        if backend == "nccl" and not dist.is_nccl_available():
            raise RunError("this build of torch has no NCCL: broadcast with gloo, or install torch for CUDA")
        self._group: _Group | None = None
        self._work: dist.Work | None = None
        """A broadcast that is in flight or was cancelled."""
        try:
            store = self._rendezvous(address, port, world_size)
            self._group = _group(backend, store, rank, world_size, self._deadline, address)
        except (RuntimeError, OSError) as error:
            raise GroupBroke(
                f"{self._name} did not form within {deadline_s:g} s: check that all {world_size} ranks live and reach "
                f"that address ({_first_line(error)})"
            ) from error

    def _rendezvous(self, address: str, port: int, world_size: int) -> TCPStore:
        """Returns the store once all ranks have reached it."""
        until_s = time.monotonic() + self._deadline.total_seconds()
        first = self.rank == 0
        store = TCPStore(address, port, world_size, is_master=first, timeout=self._deadline, wait_for_workers=False)
        present = store.add("present", 1)
        while present < world_size:
            if self._cancelled.wait(_RENDEZVOUS_POLL_S):
                raise RuntimeError("it was cancelled")
            if time.monotonic() > until_s:
                raise RuntimeError(f"{present} of {world_size} ranks connected")
            present = store.add("present", 0)
        return store

    @staticmethod
    def free_port() -> int:
        """A port that was free a moment ago."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    @staticmethod
    def host() -> str:
        """The address at which other machines reach this one; 127.0.0.1 on a machine without a network."""
        return host_address()

    def broadcast(self, tensor: Tensor) -> None:
        """Copies rank 0's tensor to every rank. The tensors are flat uint8 and have the same length on all ranks."""
        group = self._group
        if group is None:
            raise GroupBroke(f"{self._name} is closed: make a new one")
        try:
            self._work = group.broadcast([tensor], _broadcast_options(self._deadline))
            self._wait(self._work)
            self._work = None
        except RuntimeError as error:
            who = "a receiver" if self.rank == 0 else "the sender or a rank before this one"
            raise GroupBroke(
                f"{self._name} broke: {who} died, or took longer than {self._deadline.total_seconds():g} s "
                f"({_first_line(error)})"
            ) from error

    def _wait(self, work: dist.Work) -> None:
        if self._backend == "nccl":
            work.wait(self._deadline)  # ends when the group is closed
            return
        until_s = time.monotonic() + self._deadline.total_seconds() + _POLL_S
        while True:
            try:
                work.wait(timedelta(seconds=_POLL_S))
                return
            except RuntimeError:
                if work.is_completed() or time.monotonic() > until_s:
                    raise
                if self._cancelled.is_set():
                    raise RuntimeError("it was cancelled") from None

    def close(self) -> None:
        """Closes the connections without waiting for the other ranks."""
        group, self._group = self._group, None
        if group is None:
            return
        if self._work is not None and self._backend == "gloo":
            aborter = threading.Thread(target=_abort_after, args=(group, self._work, self._deadline), daemon=True)
            aborter.start()
        else:
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
        options._timeout = min(deadline, timedelta(seconds=_CONNECT_S))
        options._threads = 1
        # The interface that reaches rank 0 also reaches the others; the machine's name may resolve to a loopback address.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(address))]
        group = dist.ProcessGroupGloo(store, rank, world_size, options)
    return group  # type: ignore[no-any-return]


def _abort_after(group: _Group, work: dist.Work, deadline: timedelta) -> None:
    """Keeps a group alive until its last operation has ended: releasing it earlier would block the releasing thread."""
    with suppress(RuntimeError):
        work.wait(deadline)
    group.abort()


def _broadcast_options(deadline: timedelta) -> dist.BroadcastOptions:
    """Options of a broadcast from rank 0 with the deadline."""
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    options.timeout = deadline
    return options


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
