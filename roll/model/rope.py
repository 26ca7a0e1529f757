"""How far a model sees, and the angles its positions have.

Some models (rope types `longrope` and `dynamic`) choose the angles of all positions by the longest sequence of a pass.
Here sequences are computed beside others, in parts, and long after their keys were kept, so a position has one angle: the
one it has in sequences of the length the model was first made for. Longer ones are not taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def longest_sequence(shape: PretrainedConfig) -> int:
    """In tokens."""
    limits = [rope["original_max_position_embeddings"] for rope in _ropes(shape) if rope["rope_type"] == "longrope"]
    return int(min([shape.max_position_embeddings, *limits]))


def is_stretched(shape: PretrainedConfig) -> bool:
    """Whether the model's positions are scaled, so that others may take it for one of longer sequences."""
    return any(rope["rope_type"] not in ("default", "llama3") for rope in _ropes(shape))


def _ropes(shape: PretrainedConfig) -> Iterator[Mapping[str, Any]]:
    """How positions become angles, once or for each type of layers."""
    rope: Mapping[str, Any] = getattr(shape, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):
        if isinstance(part, Mapping) and "rope_type" in part:
            yield part


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
