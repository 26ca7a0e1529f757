"""Fuses several parameters into one storage, for products that are computed together.

The query, key and value weights of a layer are multiplied with the same hidden states, so one product over all of them is
faster than three. Their parameters become views of one storage: writing them in place updates the fused tensor, and
nothing is copied again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def fuse_parameters(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One tensor of all parameters, concatenated along their first dimension. The parameters stay the same objects with
    the same values, and are moved into a common storage if they do not share one yet."""
    whole = _whole(parameters)
    if whole is not None:
        return whole
    whole = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, torch.split(whole, [len(parameter) for parameter in parameters]), strict=True):
        parameter.data = part
    return whole


def _whole(parameters: Sequence[nn.Parameter]) -> Tensor | None:
    """The tensor that the parameters are consecutive parts of, if they are."""
    first = parameters[0].detach()
    offset = first.storage_offset()
    for parameter in parameters:
        same = parameter.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or parameter.storage_offset() != offset or not parameter.is_contiguous():
            return None
        offset += parameter.numel()
    rows = sum(len(parameter) for parameter in parameters)
    return first.as_strided((rows, *first.shape[1:]), first.stride())
