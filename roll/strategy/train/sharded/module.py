"""The model as FSDP sees it: decoder and output layer in one forward, parameters cut over the ranks.

What always holds: gradients are sums over ranks, never means: every token's weight in the loss is fixed by the whole step
before it is cut, so a mean over ranks would be wrong by their number. Sharded parameters that learn are the fp32 masters;
layers compute in the serving precision, gathered one at a time, and gradients are reduced in fp32. Frozen parameters,
beside adapters, may be in the serving precision: FSDP wants one precision of those alone that learn.

FSDP gathers a module's parameters in its forward hooks. ROLL runs the decoder alone and reads the output layer's weight
by itself, so both happen inside `forward` of one root module, whose own parameters (embedding, last norm, output layer)
stay gathered from the forward to the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel

from roll.strategy.train.sharded.sizes import cut_dim


class TrainModule(nn.Module):
    """A decoder and what reads its hidden states, in one forward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Any]) -> Any:
        """What `run` computes from the model, with the root's parameters gathered."""
        return run()


def shard(
    module: TrainModule,
    decoder: PreTrainedModel,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    *,
    on_host: bool = False,
    exact: Sequence[nn.Module] = (),
) -> None:
    """Cuts the module's parameters over the mesh, layer by layer. They compute in `dtype`, but for the `exact` modules,
    which compute in their own; with `on_host` parameters stay in host memory, and a GPU has a layer only while it
    computes."""
    policy = MixedPrecisionPolicy()
    if any(parameter.dtype != dtype for parameter in module.parameters()):
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    offload = CPUOffloadPolicy() if on_host and mesh.device_type == "cuda" else OffloadPolicy()
    size = mesh.shape[-1]

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(cut_dim(parameter.shape, size))

    for part in exact:
        fully_shard(part, mesh=mesh, offload_policy=offload)
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
            if mesh.size() > 1:  # by one rank's own number FSDP would divide too, into one more copy of the gradients
                part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
