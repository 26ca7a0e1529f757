"""A sharded trainer's update against that of one process: gradients do not depend on ranks or micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from roll.algorithm import LossSpec
from roll.cluster.mesh import MeshShape
from roll.config.errors import UserError
from roll.config.schema import TrainConfig
from roll.data import Batch
from roll.model import attention
from roll.model.character import character_tokenizer
from roll.strategy.train.optimizer import MasterAdamW, Step
from roll.strategy.train.sharded.build import ShardedModel
from roll.strategy.train.sharded.group import RankGroup
from roll.strategy.train.sharded.module import TrainModule, shard
from roll.strategy.train.sharded.strategy import ShardedStrategy
from roll.strategy.train.single import SingleStrategy
from tests.ranks import Ranks, ranks_of
from tests.strategy.train.test_single_strategy import VOCAB, make_batch

TOLERANCE = 2e-6
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 2}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=8, decoder_sparse_step=1, tie_word_embeddings=False),
}


def make_model(kind: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.float32).eval()
    model.set_attn_implementation(attention.NAME)
    return model


class Kept(MasterAdamW):
    """An optimizer that keeps the gradients it is given and changes nothing."""

    def __init__(self, model: torch.nn.Module, config: TrainConfig) -> None:
        super().__init__(model, config)
        self.kept: dict[str, Tensor] = {}

    def step(self, step: int, loss: Tensor | None = None) -> Step:
        for name, gradient in self.gradients().items():
            self.kept[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()
        self.zero_grad()
        return Step(1.0, True)


def sharded_update(
    group: RankGroup, kind: str, batch: Batch, spec: LossSpec, limit_rows: int
) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    model, config = make_model(kind), TrainConfig(micro_batch_tokens=limit_rows)
    module = TrainModule(model)
    shard(module, model.get_decoder(), group.mesh, torch.float32)
    strategy = ShardedStrategy(ShardedModel(module, model, torch.float32), config, group)
    strategy._optimizer = kept = Kept(model, config)
    stats = strategy.update(batch, spec, 0)
    return stats.loss, kept.kept, {**stats.metrics, "rows": float(stats.rows), "tokens": float(stats.tokens)}


def single_update(kind: str, batch: Batch, spec: LossSpec) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    model, config = make_model(kind), TrainConfig(micro_batch_tokens=4096)
    strategy = SingleStrategy(model, character_tokenizer(), config)
    strategy._optimizer = kept = Kept(model, config)
    stats = strategy.update(batch, spec, 0)
    return stats.loss, kept.kept, {**stats.metrics, "tokens": float(stats.tokens)}


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(
        float((found[name].double() - expected[name].double()).norm() / expected[name].double().norm().clamp_min(1e-12))
        for name in expected
    )


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with ranks_of(MeshShape(shard=2)) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with ranks_of(MeshShape(replicate=2, shard=2)) as ranks:
        yield ranks


def batch_for(seed: int, groups: int) -> Batch:
    batch = make_batch(seed, groups, longest=12)
    rng = np.random.default_rng(seed)
    return batch.with_columns(ref=batch["behaviour"] + rng.normal(0, 0.2, batch.tokens))


@pytest.mark.parametrize("kind", CONFIGS)
def test_two_ranks_and_two_replicas_of_two_have_the_gradient_of_one_process(two: Ranks, four: Ranks, kind: str) -> None:
    batch, spec = batch_for(1, 5), LossSpec("clipped", {"clip_low": 0.2, "clip_high": 0.3}, entropy_coef=0.01)
    loss, gradients, metrics = single_update(kind, batch, spec)
    for ranks in (two, four):
        for found_loss, found, found_metrics in ranks.run(sharded_update, kind, batch, spec, 40):
            assert found_loss == pytest.approx(loss, rel=1e-5, abs=1e-7)
            assert worst(found, gradients) < TOLERANCE
            for name, value in metrics.items():
                assert found_metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def too_long(group: RankGroup, batch: Batch) -> str:
    try:
        sharded_update(group, "qwen3", batch, LossSpec("reinforce"), 20)
    except UserError as error:
        return str(error)
    return ""


def test_a_sample_that_is_too_long_for_one_rank_is_refused_by_all(two: Ranks) -> None:
    said = two.run(too_long, batch_for(0, 2))
    assert said[0] == said[1]
    assert "but train.micro_batch_tokens is 20" in said[0]
