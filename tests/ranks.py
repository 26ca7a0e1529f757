"""Processes that form a process group, as the ranks of a sharded trainer do, and run what a test sends them."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
from fork_server import processes

from roll.cluster.mesh import MeshShape
from roll.strategy.train.sharded.process_group import RankGroup, RankRendezvous, open_store

DEADLINE_S = 60.0
ANSWER_S = 240.0

_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of malloc.h."""

needs_account = pytest.mark.skipif(
    not Path("/proc/self/status").is_file(), reason="needs Linux's account of a process's memory"
)


def within(room: int) -> None:
    """Limits what this process may allocate from now on to `room` bytes; pages of files that are only read do not count.
    The allocator is set to return the memory of every freed tensor, because small objects would keep the heap large. It
    is set by a call, because a process forked off an older one does not read the environment variable."""
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)
    status = Path("/proc/self/status").read_text()
    used = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + room, resource.getrlimit(resource.RLIMIT_DATA)[1]))


class Ranks:
    """Persistent ranks: `run` calls a function of a module on each of them, its first argument the rank's group."""

    def __init__(self, shape: MeshShape, deadline_s: float = DEADLINE_S, device: str = "cpu") -> None:
        """On a GPU all ranks share the one that is named."""
        self.shape = shape
        store, rendezvous = open_store("127.0.0.1", deadline_s)
        self._store = store
        pairs = [processes.Pipe() for _ in range(shape.ranks)]
        self.pipes = [ours for ours, _ in pairs]
        self.processes = [
            processes.Process(target=_serve, args=(rank, shape, rendezvous, theirs, device), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Each rank's result, by rank. Where one fails, the others' answers are read all the same: none is left for the
        next run."""
        self.send(function, *arguments)
        answers = [self._received(rank) for rank in range(self.shape.ranks)]
        for rank, (fine, result) in enumerate(answers):
            assert fine, f"rank {rank}: {result}"
        return [result for _, result in answers]

    def send(self, function: Callable[..., Any], *arguments: Any) -> None:
        for pipe in self.pipes:
            pipe.send((function, arguments))

    def answer(self, rank: int) -> Any:
        fine, result = self._received(rank)
        assert fine, f"rank {rank}: {result}"
        return result

    def _received(self, rank: int) -> tuple[bool, Any]:
        assert wait([self.pipes[rank]], ANSWER_S), f"rank {rank} does not answer"
        fine, result = self.pipes[rank].recv()
        return bool(fine), result

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(10)


@contextmanager
def ranks_of(shape: MeshShape, deadline_s: float = DEADLINE_S, device: str = "cpu") -> Iterator[Ranks]:
    ranks = Ranks(shape, deadline_s, device)
    try:
        yield ranks
    finally:
        ranks.close()


def _serve(rank: int, shape: MeshShape, rendezvous: RankRendezvous, pipe: Connection, device: str) -> None:
    import torch

    # NCCL refuses two ranks on one GPU of one host: each says that it is a host of its own, and they talk by sockets.
    os.environ |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    group = RankGroup(rank, shape, rendezvous, torch.device(device))
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(group, *arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
