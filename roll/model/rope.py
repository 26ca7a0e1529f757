"""RoPE: the longest sequence of a model, and rotary angles that do not depend on the pass.

Some models (rope types `longrope` and `dynamic`) choose the angles of all positions by the longest sequence of a pass.
Here sequences are computed together with others, in chunks, and long after their keys were cached, so a position has one
angle: the one for sequences of the original length of the model. Longer sequences are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def longest_sequence(shape: PretrainedConfig) -> int:
    """Longest supported sequence, in tokens."""
    limits = [rope["original_max_position_embeddings"] for rope in _ropes(shape) if rope["rope_type"] == "longrope"]
    return int(min([shape.max_position_embeddings, *limits]))


def is_stretched(shape: PretrainedConfig) -> bool:
    """Whether the model's positions are scaled, so that an external engine may assume longer sequences."""
    return any(rope["rope_type"] not in ("default", "llama3") for rope in _ropes(shape))


def _ropes(shape: PretrainedConfig) -> Iterator[Mapping[str, Any]]:
    """The RoPE parameters, one set or one per type of layers."""
    rope: Mapping[str, Any] = getattr(shape, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):
        if isinstance(part, Mapping) and "rope_type" in part:
            yield part


def fix_angles(model: PreTrainedModel) -> None:
    """Makes the model's angles independent of the other sequences in a pass."""
    for module in model.modules():
        kind: Any = getattr(module, "rope_type", None)
        if isinstance(kind, str):
            module.rope_type = _fixed(kind)
        elif isinstance(kind, Mapping):
            module.rope_type = {layers: _fixed(name) for layers, name in kind.items()}


def _fixed(kind: str) -> str:
    return "default" if kind == "longrope" or "dynamic" in kind else kind
