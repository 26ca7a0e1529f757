"""Checks that the mesh of a sharded role divides its model."""

from __future__ import annotations

import math

from transformers import PretrainedConfig

from roll.cluster.mesh import MeshShape
from roll.config.errors import UserError
from roll.config.suggest import either


def check_divides(role: str, mesh: MeshShape, shape: PretrainedConfig) -> None:
    """Raises if the mesh does not divide the model."""
    heads = int(shape.num_attention_heads)
    kv_heads = int(getattr(shape, "num_key_value_heads", None) or heads)
    words = int(shape.vocab_size)
    for count, what in ((heads, "attention heads"), (kv_heads, "key-value heads"), (words, "words")):
        if count % mesh.tensor:
            raise _undivided(role, "tensor", mesh.tensor, f"{count} {what}", math.gcd(heads, kv_heads, words))
    rank_heads = heads // mesh.tensor
    if rank_heads % mesh.context:
        what = "attention heads" + (" of a rank" if mesh.tensor > 1 else "")
        raise _undivided(role, "context", mesh.context, f"{rank_heads} {what}", rank_heads)
    if mesh.expert > 1:
        experts = expert_count(shape)
        if not experts:
            raise UserError(
                f"roles.{role}.parallel.expert is {mesh.expert}, but the model has no experts: write "
                f"roles.{role}.parallel.expert=1"
            )
        if not _all_have_one(experts, mesh.expert):
            fits = [str(ranks) for ranks in _divisors(mesh.copy) if _all_have_one(experts, ranks)]
            raise UserError(
                f"roles.{role}.parallel.expert is {mesh.expert}, which leaves a rank with none of the model's {experts} "
                f"experts: write roles.{role}.parallel.expert={either(fits)}"
            )


def expert_count(shape: PretrainedConfig) -> int:
    """Number of routed experts per layer; 0 for a model without experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((int(count) for name in names if (count := getattr(shape, name, None))), 0)


def _all_have_one(experts: int, ranks: int) -> bool:
    """Whether every rank gets at least one expert if all ranks but the last ones get equally many."""
    return -(-experts // ranks) * (ranks - 1) < experts


def _undivided(role: str, name: str, size: int, what: str, fits: int) -> UserError:
    """The error for a mesh dimension that does not divide `what` of the model; it suggests the divisors of `fits`."""
    return UserError(
        f"roles.{role}.parallel.{name} is {size}, which does not divide the model's {what}: write "
        f"roles.{role}.parallel.{name}={either([str(n) for n in _divisors(fits)][:6])}"
    )


def _divisors(count: int) -> list[int]:
    return [number for number in range(1, min(count, 64) + 1) if count % number == 0]
