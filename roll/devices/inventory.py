"""The hardware to run on: nodes, their cores, GPUs and memory.

On a node with GPUs, device numbers count GPUs; on a node without, they count cores. An inventory is plain data: this
module counts this machine's; code that knows a cluster builds the cluster's.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from roll.engine.memory import machine_bytes

Kind = Literal["cpu", "gpu"]


@dataclass(frozen=True, order=True)
class Device:
    """One core or one GPU: the node's number in the inventory and the device's number on that node."""

    node: int
    kind: Kind
    index: int

    def short_name(self, nodes: int = 1) -> str:
        """`gpu0`, and `node1:gpu0` where there are several nodes."""
        return f"node{self.node}:{self.kind}{self.index}" if nodes > 1 else f"{self.kind}{self.index}"


@dataclass(frozen=True)
class Node:
    """A machine. `id` is the cluster's name for it; empty for this machine."""

    name: str
    id: str
    cores: int
    gpus: int
    memory_bytes: int
    gpu_bytes: int = 0
    """Memory of each GPU."""
    aliases: tuple[str, ...] = ()
    """Other names by which a config may refer to it: host name, address."""

    @property
    def kind(self) -> Kind:
        """What its device numbers count."""
        return "gpu" if self.gpus else "cpu"

    def count(self, kind: Kind) -> int:
        return self.gpus if kind == "gpu" else self.cores


@dataclass(frozen=True)
class Inventory:
    """The nodes, in the order in which devices are counted."""

    nodes: tuple[Node, ...]

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> Inventory:
        """Nodes from plain mappings with the fields of `Node` except its name, which is `node0`, `node1`, …"""
        return cls(tuple(Node(name=f"node{number}", **row) for number, row in enumerate(rows)))

    def find(self, name: str) -> int | None:
        """The number of the node with that name or alias."""
        for number, node in enumerate(self.nodes):
            if name == node.name or name in node.aliases:
                return number
        return None

    def devices(self, kind: Kind) -> tuple[Device, ...]:
        """All devices of a kind, node by node."""
        return tuple(
            Device(number, kind, index) for number, node in enumerate(self.nodes) for index in range(node.count(kind))
        )

    def cores_of(self, node: int) -> tuple[Device, ...]:
        return tuple(Device(node, "cpu", index) for index in range(self.nodes[node].cores))

    def name(self, device: Device) -> str:
        return device.short_name(len(self.nodes))


def this_machine() -> Inventory:
    """This machine as one node: the cores this process may use, all GPUs, and the memory it may allocate."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpu_bytes = min((torch.cuda.get_device_properties(gpu).total_memory for gpu in range(gpus)), default=0)
    node = Node("node0", "", usable_cores(), gpus, machine_bytes(), gpu_bytes, (socket.gethostname(), "localhost"))
    return Inventory((node,))


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
