"""Which part of a tensor a rank holds, however it is cut: a box, with a range in every dimension."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

Box = tuple[slice, ...]
"""A range for every dimension of the whole tensor, each with a begin and an end."""


def local_box(tensor: Tensor) -> Box:
    """What this process holds of a tensor; all of one that is not cut.

    A dimension may be cut twice, over two dimensions of the mesh: into the parts of a layer (`tensor`) first, and each of
    them into shards by FSDP, which says so by another kind of placement.
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
    """A rank's part: the first have as much as there is, the last what is left."""
    each = -(-(whole.stop - whole.start) // ranks)
    begin = min(whole.start + rank * each, whole.stop)
    return slice(begin, min(begin + each, whole.stop))
