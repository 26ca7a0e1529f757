"""How the ranks of one role are arranged."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MeshShape:
    """How many ranks each dimension of the mesh has. Parameters are cut over `shard` and repeated over `replicate`: with
    four ranks and two replicas, ranks 0 and 1 hold the first copy of the weights, ranks 2 and 3 the second."""

    replicate: int = 1
    shard: int = 1

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard

    def __str__(self) -> str:
        shards = f"{self.shard} shard" + ("" if self.shard == 1 else "s")
        return f"{self.replicate} replicas of {shards}" if self.replicate > 1 else shards
