"""Meshes that do not divide the model are refused, and what is written instead divides all of it."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from roll.cluster.mesh import MeshShape
from roll.config.errors import UserError
from roll.devices.mesh_division import check_divides

DENSE = LlamaConfig(num_attention_heads=8, num_key_value_heads=4, vocab_size=102)
EXPERTS = Qwen3MoeConfig(num_attention_heads=8, num_key_value_heads=4, vocab_size=102, num_experts=6)


@pytest.mark.parametrize(
    ("shape", "mesh", "says"),
    [
        (
            DENSE,
            MeshShape(tensor=3),
            "tensor is 3, which does not divide the model's 8 attention heads: write {}tensor=1 or 2",
        ),
        (
            DENSE,
            MeshShape(tensor=8),
            "tensor is 8, which does not divide the model's 4 key-value heads: write {}tensor=1 or 2",
        ),
        (DENSE, MeshShape(tensor=4), "tensor is 4, which does not divide the model's 102 words: write {}tensor=1 or 2"),
        (
            DENSE,
            MeshShape(context=3),
            "context is 3, which does not divide the model's 8 attention heads: write {}context=1, 2, 4 or 8",
        ),
        (
            DENSE,
            MeshShape(tensor=2, context=8),
            "context is 8, which does not divide the model's 4 attention heads of a rank: write {}context=1, 2 or 4",
        ),
        (DENSE, MeshShape(shard=2, expert=2), "expert is 2, but the model has no experts: write {}expert=1"),
        (
            EXPERTS,
            MeshShape(shard=16, expert=16),
            "expert is 16, which leaves a rank with none of the model's 6 experts: write {}expert=1 or 2",
        ),
    ],
)
def test_what_does_not_divide_is_refused_with_numbers_that_do(
    shape: PretrainedConfig, mesh: MeshShape, says: str
) -> None:
    with pytest.raises(UserError) as refused:
        check_divides("actor_train", mesh, shape)
    where = "roles.actor_train.parallel."
    assert str(refused.value) == where + says.format(where)


@pytest.mark.parametrize("mesh", [MeshShape(tensor=2, context=4), MeshShape(shard=3, expert=3), MeshShape(context=8)])
def test_what_divides_is_left_alone(mesh: MeshShape) -> None:
    check_divides("actor_train", mesh, EXPERTS)
