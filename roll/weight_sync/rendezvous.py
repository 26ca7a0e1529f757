"""What a trainer tells the engines of a version that is about to travel."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal

import torch

from roll.weight_sync.broadcast import BroadcastBackend, BroadcastGroup
from roll.weight_sync.channel import Handle
from roll.weight_sync.stream import WeightManifest

Path = Literal["shared_memory", "broadcast", "cuda_ipc"]
SLOTS = 2
"""Buckets on their way at once: one is written while one is read."""


@dataclass(frozen=True)
class WeightAnnouncement:
    """A version's manifest, and the memory it will come through (none when it is broadcast)."""

    manifest: WeightManifest
    handle: Handle | None


@dataclass(frozen=True)
class Rendezvous:
    """Where a trainer and all engines meet to broadcast: the trainer is rank 0."""

    address: str
    port: int
    ranks: dict[int, int]
    """Number in the group of each engine, by its rank in its role."""
    backend: BroadcastBackend
    deadline_s: float

    def join(self, rank: int, device: str, abandoned: threading.Event | None = None) -> BroadcastGroup:
        """Returns once all have come. Blocks: call it in a thread. Who sets `abandoned` ends that, and the group."""
        on = torch.device(device if self.backend == "nccl" else "cpu")
        return BroadcastGroup(
            rank, len(self.ranks) + 1, self.address, self.port, self.backend, self.deadline_s, on, abandoned
        )
