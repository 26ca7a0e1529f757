"""Expert parallelism: packed tokens ("rows") are sent to the ranks that have their experts, and back.

Invariants: every row is computed by all experts that its router chose, none is dropped, whatever the number of rows that
an expert gets; each row is sent by one rank. Ranks of a `tensor` dimension have the same rows: each takes its run of
them; afterwards all of them have all rows again. Ranks may have different numbers of experts.

    own rows → sorted by expert → exchanged → the rank's experts → exchanged back → weighted and summed

`transformers` selects the implementation of expert products by name (`ExpertsInterface`). The function registered here
exchanges rows, and computes the products of the rank's own experts with `transformers`' grouped ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from roll.model.experts import experts_of

NAME = "roll"
_DISPATCH = "roll_dispatch"


@dataclass(frozen=True)
class ExpertDispatch:
    """Which ranks have which experts of a layer, and which ranks have the same packed tokens."""

    experts: int
    """Number of experts in the layer."""
    expert: DeviceMesh | None
    """The mesh that experts are divided over; None if every rank has all."""
    tensor: DeviceMesh | None
    """The mesh whose ranks have the same packed tokens."""

    def owned(self) -> list[int]:
        """Number of experts per rank."""
        if self.expert is None:
            return [self.experts]
        ranks = self.expert.size()
        each = -(-self.experts // ranks)
        return [max(0, min(each, self.experts - rank * each)) for rank in range(ranks)]


def split_experts(model: PreTrainedModel, expert: DeviceMesh | None, tensor: DeviceMesh | None) -> list[nn.Module]:
    """Divides the experts of each layer over the mesh, before FSDP shards each rank's part. Returns the modules that hold
    experts."""
    found = experts_of(model)
    for module in found:
        setattr(module, _DISPATCH, ExpertDispatch(_count(module), expert, tensor))
        for name, weight in list(module.named_parameters(recurse=False)) if expert is not None else []:
            divided = distribute_tensor(weight, expert, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(divided, requires_grad=weight.requires_grad))
    if found:
        model.set_experts_implementation(NAME)
    return found


def _count(module: nn.Module) -> int:
    experts: Any = module.num_experts
    return int(experts)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _experts(module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """hidden [rows, dim], index and weights [rows, chosen] → [rows, dim]"""
    dispatch: ExpertDispatch = getattr(module, _DISPATCH)
    rows, dtype = len(hidden), hidden.dtype
    if dispatch.tensor is not None:
        hidden, index, weights = (_own_rows(tensor, dispatch.tensor) for tensor in (hidden, index, weights))
    chosen = index.shape[1]
    flat = index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    sent = hidden[order // chosen]
    if dispatch.expert is None:
        found = _products(module, dispatch.experts, sent, flat[order])
    else:
        found = _exchanged_products(module, dispatch, dispatch.expert, sent, flat)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    summed = (found[inverse].view(-1, chosen, found.shape[1]) * weights[..., None]).sum(1).to(dtype)
    return summed if dispatch.tensor is None else _all_rows(summed, rows, dispatch.tensor)


ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)


def _exchanged_products(
    module: nn.Module, dispatch: ExpertDispatch, mesh: DeviceMesh, sent: Tensor, flat: Tensor
) -> Tensor:
    """The expert outputs of rows that are sorted by expert; each is computed by the rank that has the expert."""
    owned, rank, group = dispatch.owned(), mesh.get_local_rank(), mesh.get_group()
    to_send = torch.bincount(flat, minlength=dispatch.experts)
    received = to_send.new_empty(len(owned) * owned[rank])
    dist.all_to_all_single(received, to_send, [owned[rank]] * len(owned), owned, group=group)
    by_rank = torch.stack(
        [part.sum() for part in torch.split(to_send, owned)] + list(received.view(len(owned), -1).sum(1))
    )
    sizes: list[int] = by_rank.tolist()  # the only synchronisation with the device in this layer
    send, receive = sizes[: len(owned)], sizes[len(owned) :]
    rows: Tensor = _Exchange.apply(sent, send, receive, group)  # type: ignore[no-untyped-call]
    own = torch.arange(owned[rank], device=flat.device).repeat(len(owned))
    expert = own.repeat_interleave(received, output_size=len(rows))
    found: Tensor = _Exchange.apply(_products(module, owned[rank], rows, expert), receive, send, group)  # type: ignore[no-untyped-call]
    return found


def _products(module: nn.Module, experts: int, rows: Tensor, expert: Tensor) -> Tensor:
    """The outputs of each row's expert, all of which this rank has."""
    if not experts:
        return rows
    empty = not len(rows)
    if empty:  # parameters need a gradient on every rank, or the other ranks would wait for it
        rows, expert = pad(rows, (0, 0, 0, 1)), expert.new_zeros(1)
    kind = "batched_mm" if rows.dtype == torch.float64 else "grouped_mm"  # grouped_mm does not support fp64
    products = ALL_EXPERTS_FUNCTIONS[kind]
    found: Tensor = products(_OwnExperts(module, experts), rows, expert[:, None], rows.new_ones(len(rows), 1))
    return found[:-1] if empty else found


class _OwnExperts:
    """A module of experts that shows only those of this rank."""

    def __init__(self, module: nn.Module, experts: int) -> None:
        self._module = module
        self.num_experts = experts

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to_local() if isinstance(value, DTensor) else value


class _Exchange(torch.autograd.Function):
    """Rows for each rank in order → rows from each rank in order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.given = receive, send, group
        return _exchanged(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(slopes[0], *ctx.given), None, None, None


def _exchanged(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    found = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), receive, send, group=group)
    return found


def _own_rows(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's run of the rows that all ranks of the mesh have; its gradients are gathered from all ranks."""
    found: Tensor = _OwnRows.apply(tensor, mesh)  # type: ignore[no-untyped-call]
    return found


def _all_rows(tensor: Tensor, rows: int, mesh: DeviceMesh) -> Tensor:
    """All rows from the ranks' runs. In the backward pass, where every rank has all gradients, each keeps those of its
    run."""
    found: Tensor = _AllRows.apply(tensor, rows, mesh)  # type: ignore[no-untyped-call]
    return found


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.given = len(tensor), mesh
        return _run(tensor, mesh).clone()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        return _gathered(slopes[0], *ctx.given), None


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rows: int, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return _gathered(tensor, rows, mesh)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None]:
        return _run(slopes[0], ctx.mesh).contiguous(), None, None


def _run(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    each = -(-len(tensor) // mesh.size())
    begin = mesh.get_local_rank() * each
    return tensor[begin : begin + each]


def _gathered(tensor: Tensor, rows: int, mesh: DeviceMesh) -> Tensor:
    """All `rows` rows from the ranks' runs."""
    each = -(-rows // mesh.size())
    found = tensor.new_empty(mesh.size() * each, *tensor.shape[1:])
    own = torch.zeros_like(found[:each])
    own[: len(tensor)] = tensor
    dist.all_gather(list(torch.split(found, each)), own, group=mesh.get_group())
    return found if len(found) == rows else found[:rows].clone()  # FSDP looks for gradients on the tensor it is given
