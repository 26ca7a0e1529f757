"""Layers divided over the ranks of a mesh's dimension `tensor`: `transformers` says which layer is cut how (`tp_plan`),
`torch.distributed.tensor.parallel` cuts it.

What always holds: what is between layers (hidden states, norms, routers) is whole on every rank, and so are its
gradients; a weight that is whole but sees a rank's part of the heads alone (the norms of queries and keys) has its
gradients summed over the ranks in every backward pass. The embedding and the output layer are cut along the vocabulary.
Experts are not cut here: their rows are (`experts`).

What of `transformers` is used stands here and nowhere else: `PreTrainedModel.tp_plan`, its patterns and names of styles.
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
    """A weight that every rank has whole and applies to its own heads, of which its gradient is a part of a sum: DTensor
    sums it over the ranks in every backward pass."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        heads_in: Any = self._heads_in  # its annotation in torch says that hooks return nothing
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
"""Of `transformers`' styles those that decoders have, as torch's."""


def split_layers(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Cuts the model's layers over the mesh, before FSDP cuts what each rank then has. The model may have no storage
    yet."""
    words, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = words is not None and words.weight is embedding.weight
    for name, style in layer_styles(model).items():
        if not (tied and model.get_submodule(name) is words):
            parallelize_module(model.get_submodule(name), mesh, STYLES[style]())
    if tied:
        words.weight = embedding.weight


def layer_styles(model: PreTrainedModel) -> dict[str, str]:
    """How each of the model's layers is cut, by name. Raises if `transformers` has no plan, or one of other styles."""
    plan: dict[str, str] = dict(model.tp_plan or {})
    embedding, words, found = model.get_input_embeddings(), model.get_output_embeddings(), {}
    for name, module in model.named_modules():
        style = plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name))
        if module is embedding:
            style = "embedding_rowwise"
        elif module is words:
            style = "colwise"  # its forward is never called: `logprobs` reads its weight
        if style is not None and not _is_experts(name):
            found.update(_of_adapters(name, module, style))
    unknown = next(((name, style) for name, style in found.items() if style not in STYLES), None)
    if unknown is not None or len(found) <= 2:
        why = f"its layer {unknown[0]} would be cut as {unknown[1]!r}" if unknown else "transformers has no plan for it"
        raise UserError(f"parallel.tensor: {type(model).__name__} cannot be divided ({why}): write parallel.tensor=1")
    return found


def divided_dims(model: PreTrainedModel) -> dict[str, int]:
    """The dimension in which each parameter is divided, by name; those that are not divided are left out."""
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
    """The layers that compute in one's place if it is adapted: W x + B A x. Cut by its outputs, B is cut so too; cut by
    its inputs, A is."""
    if not hasattr(module, "base_layer"):
        return {name: style}
    part = {"colwise": "lora_B", "rowwise": "lora_A"}.get(style)
    cut = [] if part is None else [f"{part}.{adapter}" for adapter, _ in module.get_submodule(part).named_children()]
    return {f"{name}.{each}": style for each in ("base_layer", *cut)}
