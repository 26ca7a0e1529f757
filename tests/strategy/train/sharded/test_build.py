"""Models built over ranks from a folder: they compute what the whole model computes, and no rank holds it whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from roll.algorithm.loss_inputs import CreditSpec
from roll.cluster.mesh import MeshShape
from roll.config.schema import LoraConfig, TrainConfig
from roll.data import Batch
from roll.data.tokenlog import IntArray
from roll.model.classifier import load_classifier
from roll.model.find import ModelSource
from roll.model.loading import load_model
from roll.model.lora import Adapters, BaseModelRef, is_adapter
from roll.model.tiny import character_tokenizer
from roll.strategy.train.critic import CriticStrategy
from roll.strategy.train.reward_model import RewardModelStrategy
from roll.strategy.train.sharded.build import build_sharded
from roll.strategy.train.sharded.process_group import RankGroup
from roll.strategy.train.sharded.strategy import ShardedCritic, ShardedScorer, ShardedStrategy
from roll.strategy.train.single import SingleStrategy
from tests.ranks import Ranks, needs_account, ranks_of, within
from tests.strategy.train.sharded.trainers import CONFIGS, SIZES
from tests.strategy.train.test_single_strategy import make_batch
from tests.thorough import but

CREDIT = CreditSpec(kind="gae")


@pytest.fixture(scope="module", params=but(["qwen3_moe"], ["llama", "qwen3_moe"]))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(CONFIGS[request.param], dtype=torch.float32).save_pretrained(path)
    return path


def source(folder: Path) -> ModelSource:
    return ModelSource(str(folder), str(folder))


def log_probs_over_ranks(group: RankGroup, folder: Path, batch: Batch, dtype: torch.dtype) -> np.ndarray:
    built = build_sharded(source(folder), "frozen", dtype, 0, group)
    assert {parameter.dtype for parameter in built.model.parameters()} == {dtype}
    strategy = ShardedStrategy(built, TrainConfig(micro_batch_tokens=64), group, trainable=False)
    return strategy.log_probs(batch)


def test_a_reference_over_ranks_gives_every_rank_the_log_probs_of_the_whole_batch(two: Ranks, folder: Path) -> None:
    batch = make_batch(2, 4, longest=12)
    whole = SingleStrategy(
        load_model(source(folder), torch.float32, 0), character_tokenizer(), TrainConfig(), trainable=False
    )
    for found in two.run(log_probs_over_ranks, folder, batch, torch.float32):
        np.testing.assert_allclose(found, whole.log_probs(batch), atol=2e-5)


def critic_over_ranks(
    group: RankGroup, folder: Path, batch: Batch, steps: int
) -> tuple[list[float], np.ndarray, np.ndarray]:
    critic = ShardedCritic(build_sharded(source(folder), "critic", torch.float32, 0, group), CRITIC, 0.2, group)
    return trained(critic, batch, steps)


CRITIC = TrainConfig(lr=1e-2, micro_batch_tokens=48)


def trained(
    critic: ShardedCritic | CriticStrategy, batch: Batch, steps: int
) -> tuple[list[float], np.ndarray, np.ndarray]:
    before, losses = critic.values(batch), []
    for step in range(steps):
        losses.append(critic.update(batch.with_columns(values=critic.values(batch)), CREDIT, step).loss)
    return losses, before, critic.values(batch)


def test_a_critic_over_ranks_learns_what_one_process_learns(two: Ranks, folder: Path) -> None:
    batch = make_batch(5, 3, longest=10)
    whole = CriticStrategy(load_model(source(folder), torch.float32, 0), CRITIC, 0.2)
    losses, before, after = trained(whole, batch, 3)
    assert not before.any()
    assert losses[-1] < losses[0]
    for found_losses, found_before, found_after in two.run(critic_over_ranks, folder, batch, 3):
        assert not found_before.any()
        np.testing.assert_allclose(found_losses, losses, rtol=1e-4)
        np.testing.assert_allclose(found_after, after, atol=2e-4)


def scores_over_ranks(group: RankGroup, folder: Path, conversations: list[IntArray]) -> np.ndarray:
    scorer = ShardedScorer(
        build_sharded(source(folder), "scorer", torch.float32, 0, group), TrainConfig(micro_batch_tokens=40), group
    )
    return scorer.scores(conversations)


@pytest.mark.parametrize("count", [1, 7])
def test_a_reward_model_over_ranks_gives_the_scores_of_the_whole_one(two: Ranks, tmp_path: Path, count: int) -> None:
    torch.manual_seed(4)
    shape = LlamaConfig(**SIZES, num_labels=1, pad_token_id=0)
    AutoModelForSequenceClassification.from_config(shape, dtype=torch.float32).save_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    conversations = [rng.integers(1, SIZES["vocab_size"], length).astype(np.int32) for length in range(5, 5 + count)]
    expected = RewardModelStrategy(load_classifier(source(tmp_path), torch.float32), TrainConfig()).scores(conversations)
    for found in two.run(scores_over_ranks, tmp_path, conversations):
        np.testing.assert_allclose(found, expected, atol=2e-5)


def build_within(group: RankGroup, folder: Path, room: int) -> int:
    """The bytes of this rank's shards, loaded with so much room for everything."""
    within(room)
    built = build_sharded(source(folder), "frozen", torch.float32, 0, group)
    return sum(parameter.to_local().nbytes for parameter in built.model.parameters())


def load_whole_within(group: RankGroup, folder: Path, room: int) -> bool:
    within(room)
    try:
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except (MemoryError, RuntimeError):
        return False
    return True


WIDE = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 24}
FUSED = {"vocab_size": 512, "hidden_size": 512, "num_hidden_layers": 12, "num_experts": 6, "moe_intermediate_size": 1024}


@pytest.mark.thorough
@needs_account
def test_a_rank_never_holds_the_whole_model(tmp_path: Path) -> None:
    """Nor more than its share of six experts that four ranks cannot divide, which are cut inside."""
    shapes = {"dense": LlamaConfig(**SIZES | WIDE), "experts": Qwen3MoeConfig(**SIZES | FUSED, head_dim=8)}
    wholes = {name: saved(shape, tmp_path / name) for name, shape in shapes.items()}
    with ranks_of(MeshShape(shard=4)) as ranks:
        for name, whole in wholes.items():
            for own in ranks.run(build_within, tmp_path / name, int(whole * 0.6)):
                assert own < whole / 3.9, name
    with ranks_of(MeshShape(shard=1)) as ranks:
        for name, whole in wholes.items():
            assert ranks.run(load_whole_within, tmp_path / name, int(whole * 0.6)) == [False], name


def saved(shape: PreTrainedConfig, folder: Path) -> int:
    """The bytes of a model's parameters."""
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="40MB")
    return sum(parameter.nbytes for parameter in model.parameters())


def merged_over_ranks(group: RankGroup, found: ModelSource, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    built = build_sharded(found, "policy", dtype, 0, group)
    return {name: parameter.detach().full_tensor() for name, parameter in built.model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_adapters_are_merged_into_shards_as_into_a_whole_model(
    two: Ranks, tmp_path: Path, dtype: torch.dtype
) -> None:
    base, saved = tmp_path / "base", tmp_path / "adapters"
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(CONFIGS["llama"], dtype=torch.float32).save_pretrained(base)
    model = load_model(source(base), dtype, 0)
    adapters = Adapters(model, LoraConfig(rank=3, alpha=7), BaseModelRef(str(base)), 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.normal_(0, 0.1)
    adapters.save(saved)
    found = ModelSource(str(saved), str(base), adapters=(str(saved),))
    expected = dict(load_model(found, dtype, 0).named_parameters())
    for merged in two.run(merged_over_ranks, found, dtype):
        assert merged.keys() == expected.keys()
        assert all(torch.equal(merged[name], expected[name].float()) for name in expected if "proj" in name)
