"""The sharded trainer on a GPU: over one rank with NCCL it computes what `single` does, and one rank of a large world has
the memory that was planned for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from roll.algorithm import LossSpec
from roll.cluster.mesh import MeshShape
from roll.config.schema import LoraConfig, TrainConfig
from roll.data import Batch
from roll.model import attention
from roll.model.find import find_model
from roll.model.loading import load_model
from roll.model.lora import Adapters
from roll.model.tiny import character_tokenizer
from roll.strategy.offload import Residency
from roll.strategy.train.optimizer import OptimizerStep
from roll.strategy.train.policy import PolicyTrainer
from roll.strategy.train.sharded.build import ShardedModel, build_sharded
from roll.strategy.train.sharded.module import TrainModule, shard
from roll.strategy.train.sharded.process_group import RankGroup, open_store
from roll.strategy.train.sharded.strategy import ShardedStrategy
from roll.strategy.train.single import SingleStrategy
from tests.strategy.train.test_single_strategy import VOCAB, make_batch

pytestmark = pytest.mark.gpu

LOSS = LossSpec("clipped", {"clip_low": 0.2, "clip_high": 0.3})
LORA = LoraConfig(rank=4)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}
CONFIGS = {
    "dense": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "tied": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "mixture": Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, tie_word_embeddings=False
    ),
}


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    store, rendezvous = open_store("127.0.0.1", 60.0)
    group = RankGroup(0, MeshShape(), rendezvous, torch.device("cuda", 0), store)
    yield group
    group.close()


def make_model(kind: str, dtype: torch.dtype) -> PreTrainedModel:
    """In fp32, rounded to the precision: two models of one kind differ by nothing else."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.float32).eval()
    model.set_attn_implementation(attention.NAME)
    rounded: PreTrainedModel = model.to(dtype)
    return rounded.to("cuda")


def make_sharded(
    kind: str, dtype: torch.dtype, group: RankGroup, *, on_host: bool = False, **settings: Any
) -> ShardedStrategy:
    model = make_model(kind, dtype).float()
    if on_host:
        model.cpu()
    module = TrainModule(model)
    shard(module, model.get_decoder(), group.meshes, dtype, on_host=on_host)
    for part in model.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to("cuda"))
    return ShardedStrategy(ShardedModel(module, model, dtype), TrainConfig(**settings), group)


def make_adapted(dtype: torch.dtype, group: RankGroup, *, on_host: bool = False, **settings: Any) -> ShardedStrategy:
    """A tiny model that learns by adapters alone."""
    built = build_sharded(find_model("tiny"), "policy", dtype, 0, group, lora=LORA, on_host=on_host)
    return ShardedStrategy(built, TrainConfig(**settings), group)


def make_single_adapted(dtype: torch.dtype, **settings: Any) -> SingleStrategy:
    source = find_model("tiny")
    model = load_model(source, dtype, 0).to("cuda")
    adapters = Adapters(model, LORA, source.base(0), 0)
    return SingleStrategy(model, character_tokenizer(), TrainConfig(**settings), adapters=adapters)


def make_single(kind: str, dtype: torch.dtype, **settings: Any) -> SingleStrategy:
    return SingleStrategy(make_model(kind, dtype), character_tokenizer(), TrainConfig(**settings))


def gradients(strategy: PolicyTrainer, batch: Batch) -> dict[str, Tensor]:
    optimizer, found = strategy._optimizer, {}
    assert optimizer is not None

    def keep(step: int, loss: Tensor | None = None) -> OptimizerStep:
        for name, gradient in optimizer.gradients().items():
            found[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()
        optimizer.zero_grad()
        return OptimizerStep(1.0, True)

    optimizer.step = keep  # type: ignore[method-assign]
    strategy.update(batch, LOSS, 0)
    return found


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of all gradients together, relative: a single small one may be mostly rounding in bf16."""
    assert found.keys() == expected.keys()
    off = sum(float((found[name].double() - right.double()).square().sum()) for name, right in expected.items())
    return float((off / sum(float(right.double().square().sum()) for right in expected.values())) ** 0.5)


@pytest.mark.parametrize("kind", CONFIGS)
def test_one_rank_has_the_gradient_of_single_in_fp32(group: RankGroup, kind: str) -> None:
    batch = make_batch(1, 4, longest=12)
    settings = {"micro_batch_tokens": 40, "compile": "off"}
    expected = gradients(make_single(kind, torch.float32, **settings), batch)
    assert distance(gradients(make_sharded(kind, torch.float32, group, **settings), batch), expected) < 2e-6


@pytest.mark.parametrize("compiled", ["off", "on"])
@pytest.mark.parametrize("kind", ["dense", "tied"])
def test_in_bf16_it_is_no_further_from_fp32_than_single_is(group: RankGroup, kind: str, compiled: str) -> None:
    batch = make_batch(2, 4, longest=12)
    exact = gradients(make_single(kind, torch.float32, compile="off"), batch)
    rounded = make_single(kind, torch.bfloat16, compile=compiled)
    ours = make_sharded(kind, torch.bfloat16, group, compile=compiled)
    single, found = gradients(rounded, batch), gradients(ours, batch)
    assert 0 < distance(found, exact) < 1.25 * distance(single, exact)
    assert ours._runner._compiled is (compiled == "on")


ORDER: tuple[Residency, ...] = ("weights", "none", "all", "none", "weights", "all")


@pytest.fixture
def exact() -> Iterator[None]:
    """Without it gradients of rows that samples share are added in any order. What has no exact form stays as it is:
    attention in bf16."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["tied", "mixture"])
def test_offloaded_and_back_it_trains_as_if_it_had_stayed(group: RankGroup, kind: str, dtype: torch.dtype) -> None:
    ends = []
    for moves in (False, True):
        trainer = make_sharded(kind, dtype, group, lr=1e-2, compile="off")
        for step in range(3):
            trainer.update(make_batch(step, 4, longest=12), LOSS, step)
            trainer.probe()  # leaves the root's parameters gathered
            trainer.set_residency("all")
            before = values(trainer)
            for level in ORDER if moves else ():
                trainer.set_residency(level)
                assert places(weights(trainer)) == {"cpu" if level == "none" else "cuda"}
                assert places(moments(trainer)) == {"cuda" if level == "all" else "cpu"}
                assert all(torch.equal(value, before[name]) for name, value in values(trainer).items())
        ends.append(values(trainer))
    if dtype == torch.float32:
        assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    worst = max(float((ends[0][name] - ends[1][name]).abs().max()) for name in weights(trainer))
    assert worst < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on_host", [False, True])
def test_adapters_begin_and_train_as_in_one_process(group: RankGroup, dtype: torch.dtype, on_host: bool) -> None:
    """Also with what is frozen, in bf16, and what learns, in fp32, in host memory for a while or throughout."""
    settings = {"lr": 1e-2, "compile": "off"}
    single, trainer = make_single_adapted(dtype, **settings), make_adapted(dtype, group, on_host=on_host, **settings)
    for name, parameter in single.model.named_parameters():
        assert torch.equal(local(weights(trainer)[name]).cpu(), parameter.detach().cpu().to(weights(trainer)[name].dtype))
    places_of = {"none": "cpu", "weights": "cpu" if on_host else "cuda", "all": "cpu" if on_host else "cuda"}
    for step in range(3):
        batch = make_batch(step, 4, longest=12)
        expected, found = single.update(batch, LOSS, step), trainer.update(batch, LOSS, step)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4 if dtype == torch.float32 else 0.05)
        before = values(trainer)
        for level in ORDER:
            trainer.set_residency(level)
            assert places(weights(trainer)) == {places_of[level]}
            assert all(torch.equal(value, before[name]) for name, value in values(trainer).items())
    batch = make_batch(9, 4, longest=12)
    close = 1e-3 if dtype == torch.float32 else 0.1
    np.testing.assert_allclose(trainer.log_probs(batch), single.log_probs(batch), atol=close)
    np.testing.assert_allclose(trainer.log_probs(batch, base=True), single.log_probs(batch, base=True), atol=close)


@pytest.mark.usefixtures("exact")
def test_resumed_in_host_memory_it_trains_on(group: RankGroup, tmp_path: Path) -> None:
    stayed, resumed = (make_sharded("dense", torch.float32, group, lr=1e-2, compile="off") for _ in range(2))
    stayed.update(make_batch(0, 4, longest=12), LOSS, 0)
    stayed.save(tmp_path)
    stayed.saved()
    resumed.set_residency("none")
    resumed.load(tmp_path)
    assert places(weights(resumed)) == places(moments(resumed)) == {"cpu"}
    resumed.set_residency("all")
    assert places(weights(resumed)) == places(moments(resumed)) == {"cuda"}
    for trainer in (stayed, resumed):
        trainer.update(make_batch(1, 4, longest=12), LOSS, 1)
    expected, found = values(stayed), values(resumed)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_what_is_offloaded_frees_the_gpu_and_is_pinned(group: RankGroup) -> None:
    trainer = make_sharded("dense", torch.bfloat16, group, compile="off")
    trainer.update(make_batch(0, 4, longest=12), LOSS, 0)
    shards = sum(local(tensor).numel() * 4 for tensor in weights(trainer).values())
    before = torch.cuda.memory_allocated()
    trainer.set_residency("none")
    assert torch.cuda.memory_allocated() <= before - 3 * shards  # masters and both moments
    places = {name: local(tensor).data_ptr() for name, tensor in weights(trainer).items()}
    assert all(local(tensor).is_pinned() for tensor in weights(trainer).values())
    trainer.set_residency("all")
    trainer.set_residency("none")
    assert {name: local(tensor).data_ptr() for name, tensor in weights(trainer).items()} == places


def test_with_parameters_in_host_memory_it_trains_likewise(group: RankGroup) -> None:
    ends = []
    for on_host in (False, True):
        trainer = make_sharded("dense", torch.float32, group, on_host=on_host, lr=1e-2, compile="off")
        for step in range(2):
            stats = trainer.update(make_batch(step, 4, longest=12), LOSS, step)
            assert stats.skipped == 0
        trainer.set_residency("none")
        trainer.set_residency("all")
        assert places(weights(trainer)) == {"cpu" if on_host else "cuda"}
        assert places(moments(trainer)) == {"cpu" if on_host else "cuda"}
        ends.append(trainer.log_probs(make_batch(9, 4, longest=12)))
    assert np.abs(ends[0] - ends[1]).max() < 1e-4


def weights(trainer: ShardedStrategy) -> dict[str, Tensor]:
    return dict(trainer.model.named_parameters())


def moments(trainer: ShardedStrategy) -> dict[str, Tensor]:
    assert trainer._optimizer is not None
    return trainer._optimizer.tensors()


def values(trainer: ShardedStrategy) -> dict[str, Tensor]:
    return {name: local(tensor).cpu().clone() for name, tensor in {**weights(trainer), **moments(trainer)}.items()}


def local(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def places(tensors: dict[str, Tensor]) -> set[str]:
    """What `tensor.device` says and where its local part is: the same, or FSDP and the optimizer would be misled."""
    assert all(tensor.device == local(tensor).device for tensor in tensors.values())
    return {tensor.device.type for tensor in tensors.values()}
