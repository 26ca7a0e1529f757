"""What a rank of a sharded trainer works in, at its fullest moment.

With p the rank's trained parameters, e the root (embedding and output layer) and l a layer, both whole in the serving
precision, I the inputs that checkpointed layers keep, and r the activations of the layer at work, the fullest moment is
mostly the beginning of the backward pass:

    12 p  masters and moments
    e + 2 l  gathered parameters: the root's, the layer at work and the next
    3 l  the layer's gradients, and their fp32 copy that is reduced
    the output layer's gradient, I and r

and 4 p more of reduced gradients where an update has several micro-batches. With one micro-batch these appear as I goes:
the end of the backward pass may then be fuller.

What other layouts add is counted tensor by tensor. Where `tensor` leaves little of the MLP to a rank, the fullest moment
of a layer is the backward pass of a norm, whose hidden states are whole and in fp32. With `context` the outputs of
attention are there twice, as a rank's heads of all rows and as its rows of all heads. With `expert`, or `tensor` and
experts, these are an FSDP unit of their own, so that less of a layer is gathered ahead and reduced at once; but rows are
copied for each of their experts, and with 8 experts for each row six tensors of 8 rows each (sorted, received, sorted
again, computed, weighted, in order again) are more than all else in a layer. Ranks are planned to receive as many rows as
they send: what an uneven router adds is not in it.

Compared with one H200 as rank 0 of large worlds (`torch`'s fake process group: real kernels and memory, no wires; bf16,
checkpointed), the plan is between 0.2 % below and 3.7 % above what was allocated (`benchmarks/sharded.py`, `plan_error`).
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
"""What a sharded model is for: one that learns, a reference, a critic, or a reward model."""
Sizes = list[tuple[str, int]]
"""Parts and their bytes."""
GATHERED = "gathered parameters"


@dataclass(frozen=True)
class Peak:
    """A rank's memory at its fullest moment, by part."""

    parts: tuple[tuple[str, int], ...]

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.parts)

    def part(self, name: str) -> int:
        """Bytes of one part, 0 if it is not there at that moment."""
        return dict(self.parts).get(name, 0)


def shard_sizes(
    shape: PretrainedConfig, mesh: MeshShape, purpose: Purpose = "policy", adapters: LoraConfig | None = None
) -> ShardSizes:
    """Counted on a model without storage."""
    kind = AutoModelForSequenceClassification if purpose == "scorer" else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(shape)
        model.requires_grad_(purpose in ("policy", "critic"))
        if adapters is not None and purpose == "policy":
            inject(model, adapters)
        more = (ValueModel(model),) if purpose == "critic" else ()
    return ShardSizes.of(model, mesh, *more)


def gathered_parts(sizes: ShardSizes, footprint: Footprint) -> Sizes:
    """What a pass has of parameters beside the rank's own."""
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
    """What an update works in beside masters and moments: the fullest of its moments.

    `several`: it has several micro-batches, so that gradients are there from the second on. `predicts`: it reads words
    from hidden states, and not one number as a critic does.
    """
    item, gradients = footprint.dtype.itemsize, 4 * sizes.trained
    kept = footprint.kept_bytes(size, checkpointed=checkpointed)
    layer = footprint.layer_bytes(size)
    logits, chunks = footprint.chunk_logits(size.predicting) if predicts else (0, False)
    words = (4 if chunks else item) * sizes.output_trained
    predicting = footprint.ends_bytes(size) + (footprint.logits_bytes(logits) if predicts else 0) + words
    moments: list[Sizes] = [
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
    for unreduced, beside in _layer_moments(sizes, footprint, size):
        backward: Sizes = [
            (GATHERED, sizes.gathered_bytes(item)),
            ("unreduced gradients", unreduced),
            ("one layer at work", max(beside + (layer if checkpointed else 0), 0)),
        ]
        moments += [
            [("gradients, fp32", gradients * several), ("activations of a micro-batch", kept), *backward],
            [("gradients, fp32", gradients), *backward, ("activations of a layer", 0 if checkpointed else layer)],
        ]
    fullest = max(moments, key=lambda parts: sum(count for _, count in parts))
    return [part for part in fullest if part[1]]


def _layer_moments(sizes: ShardSizes, footprint: Footprint, size: PackedSize) -> list[tuple[int, int]]:
    """Of the moments at which a layer may need most when its backward pass comes: whole gradients, and activations beside
    what it keeps; less where some of that is gone."""
    item, model = footprint.dtype.itemsize, footprint.model
    row, inner = item * size.rows, footprint.inner_bytes(size)
    first, second = sizes.first_bytes(item), sizes.second_bytes(item)
    found = [(second, footprint.attending_bytes(size) - inner)] if sizes.apart else []
    if not footprint.compiled:
        found.append((second if sizes.apart else first, footprint.norming_bytes(size) - inner))
    if model.routed:
        # computed again, with copies of rows on their way to experts and back; then of gate, up, activation and product
        # the gradients of gate and up are left, and of the copies those that experts got, and their gradient
        found += [(sizes.before_bytes(item), footprint.dispatching_bytes(size))]
        return [*found, (first, row * (2 * model.hidden - 2 * model.inner))]
    # of the MLP's product nothing is left when the gradients of what it was made from are there
    return [*found, (first, footprint.working_bytes(size) - row * model.inner)]
