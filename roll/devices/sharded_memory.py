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

Compared with one H200 as rank 0 of large worlds (`torch`'s fake process group: real kernels and memory, no wires; bf16,
checkpointed): 3.5 % more than allocated for a dense 32B over 64 ranks with 24,509 rows, 0.1 % more for a 235B mixture of
experts over 256 with 8,102 rows, and the same for 16,319.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig

from roll.cluster.mesh import MeshShape
from roll.config.schema import LoraConfig
from roll.model.lora import inject
from roll.model.value import ValueModel
from roll.strategy.train.footprint import Footprint, PackedSize
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
    # of the MLP's product nothing is left when the gradients of what it was made from are there
    working = footprint.working_bytes(size) - item * size.rows * footprint.model.inner
    logits, chunks = footprint.chunk_logits(size.predicting) if predicts else (0, False)
    words = (4 if chunks else item) * sizes.output_trained
    predicting = footprint.ends_bytes(size) + (footprint.logits_bytes(logits) if predicts else 0) + words
    backward: Sizes = [
        (GATHERED, sizes.gathered_bytes(item)),
        ("unreduced gradients", sizes.reducing_bytes(item)),
        ("one layer at work", working + (layer if checkpointed else 0)),
    ]
    moments: list[Sizes] = [
        [
            ("gradients, fp32", gradients * several),
            (GATHERED, item * (sizes.root + sizes.layer)),
            ("activations of a micro-batch", kept),
            ("logits and the output layer's gradient", predicting),
        ],
        [("gradients, fp32", gradients * several), ("activations of a micro-batch", kept), *backward],
        [("gradients, fp32", gradients), *backward, ("activations of a layer", 0 if checkpointed else layer)],
        [
            ("gradients, fp32", gradients),
            (GATHERED, item * sizes.root),
            ("unreduced gradients", (item + 4) * sizes.root_trained),
        ],
    ]
    fullest = max(moments, key=lambda parts: sum(count for _, count in parts))
    return [part for part in fullest if part[1]]
