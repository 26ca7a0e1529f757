"""How far a model sees, and the angles its positions have.

Some models (rope types `longrope` and `dynamic`) choose the angles of all positions by the longest sequence of a pass.
Here sequences are computed beside others, in parts, and long after their keys were kept, so a position has one angle: the
one it has in sequences of the length the model was first made for. Longer ones are not taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def longest_sequence(shape: PretrainedConfig) -> int:
    """In tokens."""
    rope: Mapping[str, Any] = getattr(shape, "rope_parameters", None) or {}
    of_layers = [rope, *(part for part in rope.values() if isinstance(part, Mapping))]
    limits = [part["original_max_position_embeddings"] for part in of_layers if part.get("rope_type") == "longrope"]
    return int(min([shape.max_position_embeddings, *limits]))


def fix_angles(model: PreTrainedModel) -> None:
    """The model's angles do not depend on what else is in a pass, from now on."""
    for module in model.modules():
        kind: Any = getattr(module, "rope_type", None)
        if isinstance(kind, str):
            module.rope_type = _fixed(kind)
        elif isinstance(kind, Mapping):
            module.rope_type = {layers: _fixed(name) for layers, name in kind.items()}


def _fixed(kind: str) -> str:
    return "default" if kind == "longrope" or "dynamic" in kind else kind
