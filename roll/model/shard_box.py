"""Which part of a tensor a rank holds, however it is sharded: a box, with a range in every dimension."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

Box = tuple[slice, ...]
"""A range for every dimension of the whole tensor, each with a start and an end."""


def local_box(tensor: Tensor) -> Box:
    """This process's part of a tensor; all of it if the tensor is not sharded.

    A dimension may be divided twice, over two dimensions of the mesh: first by tensor parallelism (`tensor`), then each
    part into shards by FSDP, which uses another kind of placement.
    """
    box = [slice(0, size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        cuts = [(each, mesh.size(axis), mesh.get_local_rank(axis)) for axis, each in enumerate(tensor.placements)]
        for placed, ranks, rank in sorted(cuts, key=lambda cut: not isinstance(cut[0], Shard)):
            if not isinstance(placed, Replicate):
                box[placed.dim] = _part(box[placed.dim], ranks, rank)  # type: ignore[attr-defined]
    return tuple(box)


def _part(whole: slice, ranks: int, rank: int) -> slice:
    """A rank's part: all ranks get the same size, rounded up, except the last ones, which get the rest."""
    each = -(-(whole.stop - whole.start) // ranks)
    begin = min(whole.start + rank * each, whole.stop)
    return slice(begin, min(begin + each, whole.stop))
