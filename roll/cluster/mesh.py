"""The device mesh: how the ranks of one role are arranged.

    replicate   full replicas of the parameters
    shard       parameters are sharded over these ranks (FSDP), and each rank trains on different samples
    context     the ranks of one `context` hold parts of the rows of the same samples, and shard parameters like `shard`
    tensor      the ranks of one `tensor` hold parts of each layer, and compute the same rows
    expert      groups of this size, within a replica, hold all experts of a layer; each expert is sharded over the groups

Ranks are numbered with `tensor` fastest, then `context`, `shard` and `replicate`: ranks that communicate most are
neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MeshShape:
    """Size of each mesh dimension; `expert` regroups the ranks of the other dimensions.

    Example: with four ranks and two replicas, ranks 0 and 1 hold the first copy of the weights, ranks 2 and 3 the second.
    """

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        assert self.copy % self.expert == 0, f"{self.copy} ranks of a copy cannot be divided over {self.expert} experts"

    @property
    def ranks(self) -> int:
        return self.replicate * self.copy

    @property
    def copy(self) -> int:
        """Ranks per replica, which together hold the parameters once."""
        return self.shard * self.context * self.tensor

    @property
    def data(self) -> int:
        """Number of data-parallel parts of a batch."""
        return self.replicate * self.shard

    @property
    def cuts(self) -> int:
        """Ranks over which FSDP shards a parameter outside the experts."""
        return self.shard * self.context

    @property
    def expert_cuts(self) -> int:
        """Ranks over which FSDP shards an expert's parameter."""
        return self.copy // self.expert

    def data_rank(self, rank: int) -> int:
        """The data-parallel part that a rank computes."""
        return rank // (self.context * self.tensor)

    def __str__(self) -> str:
        shards = f"{self.shard} shard" + ("" if self.shard == 1 else "s")
        named = {"context": self.context, "tensor": self.tensor, "expert": self.expert}
        more = "".join(f", {name} {count}" for name, count in named.items() if count > 1)
        return (f"{self.replicate} replicas of {shards}" if self.replicate > 1 else shards) + more
