"""The model as FSDP sees it: decoder and output layer in one forward pass, parameters sharded over the ranks.

Invariants: gradients are sums over ranks, never means: every token's weight in the loss is fixed for the whole step
before the batch is split, so a mean over ranks would be wrong by a factor of their number. Sharded trained parameters are
the fp32 master weights; layers compute in the serving precision, gathered one at a time, and gradients are reduced in
fp32. Frozen parameters, next to adapters, may be in the serving precision: FSDP requires one precision only for the
trained ones.

FSDP gathers a module's parameters in its forward hooks. ROLL runs the decoder alone and reads the output layer's weight
itself, so both happen inside `forward` of one root module, whose own parameters (embedding, last norm, output layer) stay
gathered from the forward to the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from roll.config.errors import UserError
from roll.strategy.train.sharded.experts import split_experts
from roll.strategy.train.sharded.process_group import Meshes
from roll.strategy.train.sharded.sizes import shard_dim
from roll.strategy.train.sharded.tensor import split_layers


class TrainModule(nn.Module):
    """A decoder and the layers that read its hidden states, in one forward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Any]) -> Any:
        """The result of `run`, computed with the root's parameters gathered."""
        return run()


def shard(
    module: TrainModule,
    decoder: PreTrainedModel,
    meshes: Meshes,
    dtype: torch.dtype,
    *,
    on_host: bool = False,
    exact: Sequence[nn.Module] = (),
) -> None:
    """Divides layers over the mesh's dimension `tensor`, then shards each rank's part layer by layer with FSDP.
    Parameters compute in `dtype`, except for the `exact` modules, which compute in their own precision. With `on_host`
    parameters stay in host memory, and a GPU has a layer only while it computes it."""
    policy = MixedPrecisionPolicy()
    if any(parameter.dtype != dtype for parameter in module.parameters()):
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh = meshes.cuts
    experts: list[nn.Module] = []
    if meshes.tensor is not None:
        split_layers(_causal(module), meshes.tensor)
    if meshes.tensor is not None or meshes.expert is not None:
        experts = split_experts(_causal(module), meshes.expert, meshes.tensor)
    offload = CPUOffloadPolicy() if on_host and mesh.device_type == "cuda" else OffloadPolicy()
    size = mesh.shape[-1]

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(_shard_dim(parameter, size))

    def expert_placement(parameter: nn.Parameter) -> Shard:
        return Shard(_shard_dim(parameter, meshes.expert_cuts.shape[-1]))

    for part in exact:
        fully_shard(part, mesh=mesh, offload_policy=offload)
    for part in experts:
        fully_shard(
            part, mesh=meshes.expert_cuts, mp_policy=policy, offload_policy=offload, shard_placement_fn=expert_placement
        )
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offload, shard_placement_fn=placement)
    fully_shard(
        module,
        mesh=mesh,
        mp_policy=policy,
        offload_policy=offload,
        shard_placement_fn=placement,
        reshard_after_forward=False,
    )
    for part in module.modules():
        if isinstance(part, FSDPModule):
            if (
                meshes.cuts.size() * meshes.expert_cuts.size() > 1
            ):  # with one rank FSDP would still divide, into another copy of the gradients
                part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def _causal(module: TrainModule) -> PreTrainedModel:
    """The `transformers` model, also inside a critic."""
    model = module.model
    found = model if isinstance(model, PreTrainedModel) else model.model
    assert isinstance(found, PreTrainedModel)
    return found


def _shard_dim(parameter: nn.Parameter, size: int) -> int:
    """The dimension in which FSDP shards a parameter over `size` ranks. If `tensor` divides the parameter, it is the
    first one, unless the ranks of one part would then hold different sizes."""
    if not isinstance(parameter, DTensor):
        return shard_dim(parameter.shape, size)
    local, divided = parameter.to_local().shape, {each.dim for each in parameter.placements if isinstance(each, Shard)}
    if len(local) > 2:  # experts
        return next((dim for dim in (1, 2) if local[dim] % size == 0), 0)
    if 0 not in divided or local[0] % size == 0:
        return 0
    if len(local) > 1 and local[1] % size == 0:
        return 1
    raise UserError(
        f"parallel: a parameter of {tuple(parameter.shape)} cannot be divided over {parameter.device_mesh.size()} and "
        f"then cut over {size}: write another number of devices, or parallel.tensor=1"
    )
