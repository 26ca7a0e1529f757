"""Messages from the trainer to the engines before a weight sync: the announcement of a version, and the rendezvous."""

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
"""Bucket slots: one is written while the other is read."""


@dataclass(frozen=True)
class WeightAnnouncement:
    """A version's manifest, and the handle of the shared memory for its buckets (None for a broadcast)."""

    manifest: WeightManifest
    handle: Handle | None


@dataclass(frozen=True)
class Rendezvous:
    """The rendezvous of the broadcast process group, in which the trainer is rank 0."""

    address: str
    port: int
    ranks: dict[int, int]
    """Maps an engine's rank in its role to its rank in the broadcast process group."""
    backend: BroadcastBackend
    deadline_s: float

    def join(self, rank: int, device: str, cancelled: threading.Event | None = None) -> BroadcastGroup:
        """Joins the group; returns once all ranks have joined. Blocks: call it in a thread. Setting `cancelled` ends the
        wait and every later wait of the group."""
        on = torch.device(device if self.backend == "nccl" else "cpu")
        return BroadcastGroup(
            rank, len(self.ranks) + 1, self.address, self.port, self.backend, self.deadline_s, on, cancelled
        )
