"""The memory of a rank: its part of every parameter, and its fullest moment against what a GPU allocated."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from roll.cluster.mesh import MeshShape
from roll.config.errors import UserError
from roll.config.schema import Config, LoraConfig
from roll.data.sources import load_tasks
from roll.devices.inventory import Inventory
from roll.devices.memory import MASTERS, sharded_peak
from roll.devices.plan import Plan, check_memory, make_plan
from roll.devices.run_requirements import rlvr_requirements
from roll.devices.sharded_memory import GATHERED, shard_sizes
from roll.model.find import find_model
from roll.model.loading import load_model_config
from roll.model.shape import ModelShape
from roll.strategy.train.activation_memory import PackedSize, Spans
from roll.strategy.train.layer_wrapping import compiles
from roll.strategy.train.sharded.sizes import local_numel, shard_dim

GIB = 1 << 30
DENSE_32B = Qwen3Config(
    vocab_size=151936,
    hidden_size=5120,
    intermediate_size=25600,
    num_hidden_layers=64,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=False,
)
EXPERTS_235B = Qwen3MoeConfig(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    moe_intermediate_size=1536,
    num_hidden_layers=94,
    num_attention_heads=64,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    tie_word_embeddings=False,
)


DENSE_70B = LlamaConfig(
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    tie_word_embeddings=False,
)


@pytest.mark.parametrize(
    ("shape", "mesh", "rows", "allocated_gib"),
    [
        (DENSE_32B, MeshShape(shard=64), 24_509, 40.1),
        (DENSE_32B, MeshShape(shard=8, context=8), 131_072, 31.67),
        (DENSE_70B, MeshShape(shard=8, tensor=8), 24_169, 49.68),
        (EXPERTS_235B, MeshShape(shard=256), 8_102, 45.2),
        (EXPERTS_235B, MeshShape(shard=256), 16_319, 53.7),
        (EXPERTS_235B, MeshShape(shard=256, expert=8), 16_146, 36.39),
        (EXPERTS_235B, MeshShape(shard=256, expert=64), 16_146, 35.90),
        (EXPERTS_235B, MeshShape(shard=64, tensor=4, expert=64), 16_146, 26.40),
        (EXPERTS_235B, MeshShape(shard=16, context=16, expert=64), 131_072, 25.51),
    ],
    ids=lambda value: str(value) if isinstance(value, MeshShape | int | float) else value.model_type,
)
def test_the_peak_is_what_an_h200_allocated_as_rank_0(
    shape: PretrainedConfig, mesh: MeshShape, rows: int, allocated_gib: float
) -> None:
    assert sharded_peak(shape, mesh, rows).bytes / GIB == pytest.approx(allocated_gib, rel=0.04)


def test_layers_that_are_divided_over_tensor_are_not_compiled() -> None:
    assert compiles("auto", "cuda", torch.bfloat16, adapted=False)
    assert not compiles("auto", "cuda", torch.bfloat16, adapted=False, tensor=2)
    with pytest.raises(UserError, match=r"train.compile is on, .* parallel.tensor=2 .*: write train.compile=auto"):
        compiles("on", "cuda", torch.bfloat16, adapted=False, tensor=2)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(1, 12))
def test_a_rank_has_room_for_the_largest_part(shape: list[int], shards: int) -> None:
    dim = shard_dim(shape, shards)
    parts = torch.empty(shape, device="meta").chunk(shards, dim)
    assert local_numel(shape, shards) == max(part.numel() for part in parts)
    if len(shape) == 3 and any(size % shards == 0 for size in shape):
        assert local_numel(shape, shards) * shards == prod(shape), "experts are cut where they divide"
    elif len(shape) < 3:
        assert dim == 0


def small(tied: bool = False, layers: int = 3) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )


@pytest.mark.parametrize("tied", [False, True])
def test_units_add_up_to_the_model(tied: bool) -> None:
    sizes, whole = shard_sizes(small(tied), MeshShape()), ModelShape.of(small(tied))
    assert sizes.trained == whole.parameters == sizes.root + 3 * sizes.layer
    assert sizes.frozen == 0
    assert sizes.output_trained == whole.output == 64_000
    assert sizes.root == (64_000 if tied else 128_000) + 64
    assert (sizes.layer_trained, sizes.root_trained) == (sizes.layer, sizes.root)


def test_parts_are_rounded_up_parameter_by_parameter() -> None:
    sizes = shard_sizes(small(), MeshShape(shard=48))
    up, down, keys, norms = 2 * 4 * 64, 2 * 160, 2 * 1 * 64, 2 * 2
    layer = up + down + (2 * 2 * 64 + keys) + norms
    assert sizes.trained == 3 * layer + 2 * 21 * 64 + 2
    assert sizes.trained > ModelShape.of(small()).parameters / 48


def test_more_shards_are_less_memory_and_replicas_none() -> None:
    one, eight = (sharded_peak(small(), MeshShape(1, shards), 512) for shards in (1, 8))
    assert eight.part(MASTERS) == pytest.approx(one.part(MASTERS) / 8, rel=0.01)
    assert eight.part(GATHERED) == one.part(GATHERED), "a layer is gathered whole"
    assert sharded_peak(small(), MeshShape(4, 2), 512) == sharded_peak(small(), MeshShape(1, 2), 512)


def test_only_adapters_have_masters_and_moments() -> None:
    lora = LoraConfig(rank=4)
    plain, adapted = (sharded_peak(small(), MeshShape(1, 2), 256, adapters=adapters) for adapters in (None, lora))
    shape = ModelShape.of(small(), lora)
    assert adapted.part("weights") == pytest.approx(shape.parameters, rel=0.01), "two bytes each, on two ranks"
    assert adapted.part(MASTERS) == pytest.approx(4 * shape.adapters / 2, rel=0.05)
    assert plain.part("weights") == 0
    assert adapted.bytes < plain.bytes


def test_a_frozen_model_has_its_weights_alone() -> None:
    peak = sharded_peak(small(), MeshShape(1, 4), 256, purpose="frozen")
    assert peak.part("weights") == pytest.approx(2 * ModelShape.of(small()).parameters / 4, rel=0.02)
    assert {name for name, _ in peak.parts} == {"weights", GATHERED, "a forward pass"}


def test_the_words_of_a_critic_are_held_and_do_not_learn() -> None:
    critic, policy = (shard_sizes(small(), MeshShape(shard=2), purpose) for purpose in ("critic", "policy"))
    assert critic.frozen == 32_000
    assert critic.trained == policy.trained - 32_000 + 65, "the head is one row, which one rank has"
    assert critic.output_trained == 0
    peak = sharded_peak(small(), MeshShape(1, 2), 256, purpose="critic")
    assert peak.part("weights") == 4 * 32_000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_takes_more(dtype: torch.dtype) -> None:
    mesh, rows = MeshShape(1, 2), 2048

    def peak(rows: int = rows, **others: bool) -> int:
        return sharded_peak(small(layers=6), mesh, rows, dtype=dtype, **others).bytes  # type: ignore[arg-type]

    assert peak() < peak(2 * rows)
    assert peak() < peak(several=True)
    assert peak() < peak(checkpointed=False)
    assert peak(checkpointed=False, compiled=True) < peak(checkpointed=False)
    quantised = sharded_peak(small(layers=6), mesh, rows, dtype=dtype, optimizer="adamw_8bit")
    assert quantised.bytes < peak()


def test_rows_may_come_with_their_attentions() -> None:
    plain = sharded_peak(small(), MeshShape(1, 2), 128)
    assert sharded_peak(small(), MeshShape(1, 2), PackedSize(128, 128, (Spans(128, 1, 1),))) == plain
    shared = PackedSize(128, 64, (Spans(1, 64, 64), Spans(4, 16, 80)))
    assert sharded_peak(small(), MeshShape(1, 2), shared).bytes > 0


@pytest.mark.parametrize(
    ("config", "inner"),
    [
        (small(), 160),
        (Qwen3MoeConfig(hidden_size=64, intermediate_size=300, moe_intermediate_size=32, num_experts_per_tok=2), 64),
    ],
)
def test_a_token_goes_through_few_experts(config: PretrainedConfig, inner: int) -> None:
    config.num_hidden_layers = 1
    assert ModelShape.of(config).inner == inner


def planned(gpu_mib: int, roles: dict[str, Any], gpus: int = 8) -> Plan:
    config = Config.model_validate(
        {
            "model": {"path": "tiny", "dtype": "bf16"},
            "tasks": "echo",
            "reward": "number",
            "executor": "ray",
            "rollout": {"max_running": 1, "max_new_tokens": 1, "group_size": 2},
            "weight_sync": {"bucket_mb": 1},
            "roles": roles,
        }
    )
    row = {"id": "", "cores": 8, "gpus": gpus, "memory_bytes": 1 << 40, "gpu_bytes": gpu_mib << 20}
    return make_plan(config, rlvr_requirements(config, load_tasks(config.tasks, None)), Inventory.of([row]))


@pytest.mark.parametrize(
    ("gpu_mib", "train", "instead"),
    [
        (12, {"devices": "0-3", "parallel": {"replicate": 4}}, "write roles.actor_train.parallel.replicate=2"),
        (8, {"devices": "0-3", "parallel": {"replicate": 4}}, "write roles.actor_train.parallel.replicate=1"),
        (9, "0-1", "write 4 GPUs or more in roles.actor_train.devices"),
        (9, "0", "or several GPUs for it in roles.actor_train.devices, over which it is sharded"),
        (2, "0-3", "other devices for it in roles.actor_train.devices"),
    ],
)
def test_ranks_that_do_not_fit_are_refused_with_the_line_to_write(gpu_mib: int, train: Any, instead: str) -> None:
    plan = planned(gpu_mib, {"actor_train": train, "actor_infer": "cpu"})
    assert plan.problem is not None
    assert plan.problem.startswith("in the phase ")
    assert instead in plan.problem
    with pytest.raises(UserError, match="actor_train"):
        check_memory(plan)


def test_a_sharded_trainer_saves_its_masters_once() -> None:
    roles = {"actor_infer": "cpu"}
    single, sharded = (planned(80 << 10, {**roles, "actor_train": devices}).writes for devices in ("0", "0-3"))
    parameters = ModelShape.of(load_model_config(find_model("tiny"))).parameters
    assert single.checkpoint_bytes - sharded.checkpoint_bytes == 2 * parameters
