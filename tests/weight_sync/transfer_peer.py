"""The other processes of the transfer tests, and what both sides know."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from fork_server import processes
from torch import Tensor

from roll.weight_sync.broadcast import BroadcastBackend, BroadcastGroup
from roll.weight_sync.channel import Handle, SharedMemoryChannel
from roll.weight_sync.stream import Receiver, Sender, WeightManifest

MEGABYTE = 1 << 20
BUCKET_BYTES = MEGABYTE
LOCAL = "127.0.0.1"
MEETING_S = 60.0
"""Deadline of groups: on a busy machine a process may take long to start."""

BY_SOCKETS = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
"""How NCCL is to talk between processes that it takes for different hosts."""


def tensors_of(seed: int, device: str = "cpu", megabytes: int = 8) -> dict[str, Tensor]:
    """A tensor of many buckets, and small ones about it."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "first": torch.randn(37, generator=generator),
        "embed": torch.randint(0, 256, (megabytes * 4096, 256), dtype=torch.uint8, generator=generator),
        "half": torch.randn(1000, 1000, generator=generator).bfloat16(),
        "steps": torch.randint(0, 1000, (5,), generator=generator),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()}


class Peer:
    """An engine's process: what the tests call there, by name."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.receiver = Receiver({})
        self.memory = PeakMemory()

    def make(self, seed: int, device: str = "cpu", megabytes: int = 8) -> None:
        self.receiver.close()
        self.tensors = tensors_of(seed, device, megabytes)
        self.receiver = Receiver(self.tensors)

    def begin(self, manifest: WeightManifest, handle: Handle | None) -> None:
        self.memory = PeakMemory()
        self.receiver.begin(manifest, handle)

    def load(self, bucket: int) -> None:
        self.receiver.load(bucket)

    def receive(self, port: int, backend: BroadcastBackend = "gloo") -> None:
        device = torch.device("cuda", 0) if backend == "nccl" else None
        group = BroadcastGroup(1, 2, LOCAL, port, backend, deadline_s=60, device=device)
        self.receiver.receive(group)
        group.close()

    def finish(self) -> list[str]:
        return self.receiver.finish()

    def peak(self) -> int:
        return self.memory.growth_bytes()

    def sum_of(self, name: str) -> float:
        return float(self.tensors[name].double().sum())

    def close(self) -> None:
        self.receiver.close()


def serve(pipe: Connection) -> None:
    peer = Peer()
    while (call := pipe.recv()) is not None:
        method, arguments = call
        try:
            pipe.send((True, getattr(peer, method)(*arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


def ask(pipe: Connection, method: str, *arguments: object) -> Any:
    pipe.send((method, arguments))
    return answer(pipe)


def answer(pipe: Connection) -> Any:
    assert pipe.poll(60), "the other process does not answer"
    fine, result = pipe.recv()
    assert fine, result
    return result


def hold_channels(pipe: Connection) -> None:
    channels = [SharedMemoryChannel.create(2, 4096, backing) for backing in ("memfd", "file")]
    for channel in channels:
        channel.slot(0).fill_(7)
    pipe.send([channel.handle for channel in channels])
    signal.pause()


def die_in_a_broadcast(pipe: Connection) -> None:
    """Sends the manifest and two buckets, then is killed."""
    sender = Sender(tensors_of(0), BUCKET_BYTES)
    pipe.send(sender.manifest(1, torch.arange(3), torch.zeros(2)))
    group = BroadcastGroup(0, 2, LOCAL, pipe.recv(), "gloo", MEETING_S)
    broadcast, sent = group.broadcast, []

    def broadcast_twice(tensor: Tensor) -> None:
        if len(sent) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        broadcast(tensor)
        sent.append(len(tensor))

    group.broadcast = broadcast_twice  # type: ignore[method-assign]
    sender.broadcast(group)


def serve_on_another_host(pipe: Connection) -> None:
    """What the process is forked off may have been started before a test sets anything."""
    os.environ.update(BY_SOCKETS, NCCL_HOSTID="another")
    serve(pipe)


def spawn(target: Callable[[Connection], None]) -> tuple[BaseProcess, Connection]:
    here, there = processes.Pipe()
    process = processes.Process(target=target, args=(there,), daemon=True)
    process.start()
    there.close()
    return process, here


class PeakMemory:
    """By how much the process has grown, at its largest, since this was made. Starting another one resets it."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status_bytes("VmRSS")

    def growth_bytes(self) -> int:
        return _status_bytes("VmHWM") - self._before


def _status_bytes(field: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024
