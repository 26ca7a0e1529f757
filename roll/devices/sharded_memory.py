"""Working memory of one rank of a sharded trainer at its peak.

Let p be the rank's trained parameters, e the root (embedding and output layer) and l a layer, both unsharded in the
serving precision, I the inputs that checkpointed layers keep, and r the activations of the current layer. The peak is
usually at the start of the backward pass:

    12 p  master weights and moments
    e + 2 l  gathered parameters: the root's, the current layer's and the next one's
    3 l  the layer's gradients, and their fp32 copy that is reduced
    the output layer's gradient, I and r

An update with several micro-batches adds 4 p of reduced gradients. With one micro-batch these are allocated while I is
freed, so the peak may be at the end of the backward pass.

What other layouts add is counted tensor by tensor. If `tensor` leaves a rank only a small part of the MLP, the peak of a
layer is the backward pass of a norm, whose hidden states are not divided and in fp32. With `context` the outputs of
attention exist twice: for the rank's heads and all tokens, and for all heads and the rank's tokens. With `expert`, or
`tensor` and experts, the experts are an FSDP unit of their own, so less of a layer is gathered ahead and reduced at once.
But tokens are copied for each of their experts: with 8 experts per token, six tensors of 8 copies each (sorted, received,
sorted again, computed, weighted, in order again) are larger than everything else in a layer. The plan assumes that a rank
receives as many tokens as it sends; it does not include what an unbalanced router adds.

Measured on one H200 as rank 0 of large worlds (`torch`'s fake process group: real kernels and memory, no communication;
bf16, checkpointed), the estimate is between 0.2 % below and 3.7 % above the allocated memory (`benchmarks/sharded.py`,
`plan_error`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig

from roll.cluster.mesh import MeshShape
from roll.config.schema import LoraConfig
from roll.model.lora import inject
from roll.model.value_head import ValueModel
from roll.strategy.train.activation_memory import Footprint, PackedSize
from roll.strategy.train.sharded.sizes import ShardSizes

Purpose: TypeAlias = Literal["policy", "frozen", "critic", "scorer"]
"""The purpose of a sharded model: a trained policy, a frozen reference, a critic, or a reward model."""
Sizes = list[tuple[str, int]]
"""Items and their bytes."""
GATHERED = "gathered parameters"


@dataclass(frozen=True)
class Peak:
    """A rank's memory at its peak, by item."""

    parts: tuple[tuple[str, int], ...]

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.parts)

    def part(self, name: str) -> int:
        """Bytes of one item; 0 if it does not exist at the peak."""
        return dict(self.parts).get(name, 0)


def shard_sizes(
    shape: PretrainedConfig, mesh: MeshShape, purpose: Purpose = "policy", adapters: LoraConfig | None = None
) -> ShardSizes:
    """The sizes of a rank's shards, counted on a model on the meta device."""
    kind = AutoModelForSequenceClassification if purpose == "scorer" else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(shape)
        model.requires_grad_(purpose in ("policy", "critic"))
        if adapters is not None and purpose == "policy":
            inject(model, adapters)
        value_heads = (ValueModel(model),) if purpose == "critic" else ()
    return ShardSizes.of(model, mesh, *value_heads)


def gathered_parts(sizes: ShardSizes, footprint: Footprint) -> Sizes:
    """The gathered parameters that a pass holds in addition to the rank's own shards."""
    return [(GATHERED, sizes.gathered_bytes(footprint.dtype.itemsize))]


def update_parts(
    sizes: ShardSizes,
    footprint: Footprint,
    size: PackedSize,
    *,
    checkpointed: bool,
    several: bool,
    predicts: bool = True,
) -> Sizes:
    """The working memory of an update at its peak, besides master weights and moments.

    `several`: the update has several micro-batches, so that gradients exist from the second on. `predicts`: the model
    computes logits; a critic computes one value per token instead.
    """
    item, gradients = footprint.dtype.itemsize, 4 * sizes.trained
    kept = footprint.kept_bytes(size, checkpointed=checkpointed)
    layer = footprint.layer_bytes(size)
    logits, chunks = footprint.chunk_logits(size.predicting) if predicts else (0, False)
    output_gradient = (4 if chunks else item) * sizes.output_trained
    predicting = footprint.ends_bytes(size) + (footprint.logits_bytes(logits) if predicts else 0) + output_gradient
    candidates: list[Sizes] = [
        [
            ("gradients, fp32", gradients * several),
            (GATHERED, item * (sizes.root + sizes.layer)),
            ("activations of a micro-batch", kept),
            ("logits and the output layer's gradient", predicting),
        ],
        [
            ("gradients, fp32", gradients),
            (GATHERED, item * sizes.root),
            ("unreduced gradients", (item + 4) * sizes.root_trained),
        ],
    ]
    for unreduced, activations in _layer_peaks(sizes, footprint, size):
        backward: Sizes = [
            (GATHERED, sizes.gathered_bytes(item)),
            ("unreduced gradients", unreduced),
            ("one layer at work", max(activations + (layer if checkpointed else 0), 0)),
        ]
        candidates += [
            [("gradients, fp32", gradients * several), ("activations of a micro-batch", kept), *backward],
            [("gradients, fp32", gradients), *backward, ("activations of a layer", 0 if checkpointed else layer)],
        ]
    fullest = max(candidates, key=lambda parts: sum(count for _, count in parts))
    return [part for part in fullest if part[1]]


def _layer_peaks(sizes: ShardSizes, footprint: Footprint, size: PackedSize) -> list[tuple[int, int]]:
    """For each moment at which a layer's backward pass may need most memory: the bytes of unreduced gradients, and of
    activations in addition to those the layer keeps (negative if some of them are already freed)."""
    item, model = footprint.dtype.itemsize, footprint.model
    row, inner = item * size.rows, footprint.inner_bytes(size)
    first, second = sizes.first_bytes(item), sizes.second_bytes(item)
    found = [(second, footprint.attending_bytes(size) - inner)] if sizes.apart else []
    if not footprint.compiled:
        found.append((second if sizes.apart else first, footprint.norming_bytes(size) - inner))
    if model.routed:
        # the layer is recomputed, with the rows copied on their way to the experts and back; then, of gate, up,
        # activation and product, only the gradients of gate and up remain, and of the copies the experts' input and its
        # gradient
        found += [(sizes.waiting_bytes(item), footprint.dispatching_bytes(size))]
        return [*found, (first, row * (2 * model.hidden - 2 * model.inner))]
    # the MLP's product is already freed when the gradients of its factors exist
    return [*found, (first, footprint.working_bytes(size) - row * model.inner)]
