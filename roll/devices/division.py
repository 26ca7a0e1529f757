"""Whether the mesh of a sharded role divides its model."""

from __future__ import annotations

from transformers import PretrainedConfig

from roll.cluster.mesh import MeshShape
from roll.config.errors import UserError
from roll.config.names import either


def check_divides(role: str, mesh: MeshShape, shape: PretrainedConfig) -> None:
    """Refuses a mesh that does not divide the model."""
    heads = int(shape.num_attention_heads)
    kv_heads = int(getattr(shape, "num_key_value_heads", None) or heads)
    words = int(shape.vocab_size)
    for count, what in ((heads, "attention heads"), (kv_heads, "key-value heads"), (words, "words")):
        if count % mesh.tensor:
            raise _undivided(role, "tensor", mesh.tensor, count, what)
    if heads // mesh.tensor % mesh.context:
        raise _undivided(role, "context", mesh.context, heads // mesh.tensor, "attention heads of a rank")
    if mesh.expert > 1:
        experts = expert_count(shape)
        if not experts:
            raise UserError(
                f"roles.{role}.parallel.expert is {mesh.expert}, but the model has no experts: write "
                f"roles.{role}.parallel.expert=1"
            )
        if -(-experts // mesh.expert) * (mesh.expert - 1) >= experts:
            raise UserError(
                f"roles.{role}.parallel.expert is {mesh.expert}, which leaves a rank with none of the model's {experts} "
                f"experts: write roles.{role}.parallel.expert={either([str(n) for n in _divisors(experts)])}"
            )


def expert_count(shape: PretrainedConfig) -> int:
    """Routed experts of a layer, 0 of a model without."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((int(count) for name in names if (count := getattr(shape, name, None))), 0)


def _undivided(role: str, name: str, size: int, count: int, what: str) -> UserError:
    return UserError(
        f"roles.{role}.parallel.{name} is {size}, which does not divide the model's {count} {what}: write "
        f"roles.{role}.parallel.{name}={either([str(n) for n in _divisors(count)][:6])}"
    )


def _divisors(count: int) -> list[int]:
    return [number for number in range(1, min(count, 64) + 1) if count % number == 0]
