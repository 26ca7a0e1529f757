"""Tensor parallelism: layers divided over the ranks of a mesh's dimension `tensor`. `transformers` defines how each layer
is divided (`tp_plan`), `torch.distributed.tensor.parallel` divides it.

Invariants: everything between layers (hidden states, norms, routers) is whole on every rank, and so are its gradients. A
weight that is whole but sees only a rank's part of the heads (the norms of queries and keys) has its gradients summed
over the ranks in every backward pass. The embedding and the output layer are divided along the vocabulary. Experts are
not divided here; their packed tokens are (`experts`).

Only this module uses these parts of `transformers`: `PreTrainedModel.tp_plan`, its patterns and names of styles.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from roll.config.errors import UserError


class PerHead(ParallelStyle):
    """A weight that every rank has whole and applies to its own heads. Its gradient is then a part of a sum: DTensor sums
    it over the ranks in every backward pass."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        heads_in: Any = self._heads_in  # torch annotates the hooks as returning nothing
        heads_out: Any = self._heads_out
        return distribute_module(module, device_mesh, self._whole, heads_in, heads_out)

    @staticmethod
    def _whole(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, weight in list(module.named_parameters(recurse=False)):
            repeated = distribute_tensor(weight, mesh, [Replicate()], src_data_rank=None)
            module.register_parameter(key, nn.Parameter(repeated, requires_grad=weight.requires_grad))

    @staticmethod
    def _heads_in(module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[DTensor, ...]:
        """[…, own heads, dim] → the heads of all ranks"""
        (states,) = inputs
        return (DTensor.from_local(states, mesh, [Shard(states.ndim - 2)], run_check=False),)

    @staticmethod
    def _heads_out(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        return output.to_local()


STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "replicated_with_grad_allreduce": PerHead,
}
"""The styles of `transformers` that decoders use, as torch's."""


def split_layers(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Divides the model's layers over the mesh, before FSDP shards each rank's part. The model may have no storage
    yet."""
    output_layer, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = output_layer is not None and output_layer.weight is embedding.weight
    for name, style in layer_styles(model).items():
        if not (tied and model.get_submodule(name) is output_layer):
            parallelize_module(model.get_submodule(name), mesh, STYLES[style]())
    if tied:
        output_layer.weight = embedding.weight


def layer_styles(model: PreTrainedModel) -> dict[str, str]:
    """How each of the model's layers is divided, by name. Raises if `transformers` has no plan, or one with unsupported
    styles."""
    plan: dict[str, str] = dict(model.tp_plan or {})
    embedding, output_layer, found = model.get_input_embeddings(), model.get_output_embeddings(), {}
    for name, module in model.named_modules():
        style = plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name))
        if module is embedding:
            style = "embedding_rowwise"
        elif module is output_layer:
            style = "colwise"  # its forward is never called: `logprobs` reads its weight
        if style is not None and not _is_experts(name):
            found.update(_of_adapters(name, module, style))
    unknown = next(((name, style) for name, style in found.items() if style not in STYLES), None)
    if unknown is not None or len(found) <= 2:
        why = f"its layer {unknown[0]} would be cut as {unknown[1]!r}" if unknown else "transformers has no plan for it"
        raise UserError(f"parallel.tensor: {type(model).__name__} cannot be divided ({why}): write parallel.tensor=1")
    return found


def divided_dims(model: PreTrainedModel) -> dict[str, int]:
    """The dimension in which each parameter is divided, by name, without those that are not divided."""
    found: dict[str, int] = {}
    for name, style in layer_styles(model).items():
        module = model.get_submodule(name)
        if style.startswith("colwise"):
            found |= {f"{name}.{key}": 0 for key, _ in module.named_parameters(recurse=False)}
        elif style != "replicated_with_grad_allreduce":
            found[f"{name}.weight"] = 0 if isinstance(module, nn.Embedding) else 1
    return found


def _is_experts(name: str) -> bool:
    return "experts" in name.split(".")


def _of_adapters(name: str, module: nn.Module, style: str) -> dict[str, str]:
    """The parts of an adapted layer, W x + B A x, that are divided. If W is divided by its outputs, so is B; if by its
    inputs, so is A."""
    if not hasattr(module, "base_layer"):
        return {name: style}
    part = {"colwise": "lora_B", "rowwise": "lora_A"}.get(style)
    cut = [] if part is None else [f"{part}.{adapter}" for adapter, _ in module.get_submodule(part).named_children()]
    return {f"{name}.{each}": style for each in ("base_layer", *cut)}
