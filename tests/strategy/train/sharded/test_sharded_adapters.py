"""Adapters over ranks: those of one process, their gradients, and what is published and saved of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from roll.algorithm import LossSpec
from roll.config.errors import UserError
from roll.config.schema import LoraConfig, TrainConfig
from roll.data import Batch
from roll.data.tokenlog import FloatArray
from roll.model.find import ModelSource
from roll.model.loading import load_model
from roll.model.lora import Adapters, inject, is_adapter
from roll.model.shard_loading import _copy
from roll.model.tiny import character_tokenizer
from roll.strategy.train.sharded.build import build_sharded
from roll.strategy.train.sharded.process_group import RankGroup
from roll.strategy.train.sharded.strategy import ShardedStrategy
from roll.strategy.train.single import SingleStrategy
from roll.weight_sync.digest import digests
from roll.weight_sync.stream import Sender
from tests.ranks import Ranks
from tests.strategy.train.sharded.trainers import CONFIGS, Gradients, Groups, Kept, errors, make_batch, whole
from tests.thorough import but

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
SEED = 5
KL = LossSpec("clipped", {"clip_low": 0.2, "clip_high": 0.3}, kl_coef=0.1)
TOLERANCE = 2e-6


@dataclass(frozen=True)
class Adapted:
    """A model in a folder, and the adapters that are trained in it."""

    folder: Path
    dtype: torch.dtype = FP32
    merged: tuple[str, ...] = ()
    """Folders of adapters of an earlier run, which are part of the model."""
    rank: int = 3
    """Which two ranks cannot halve."""
    dropout: float = 0.0
    learned: bool = True
    """Whether they are no longer as they began."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the section `train`."""

    @property
    def mixture(self) -> bool:
        return "moe" in self.folder.name

    @property
    def lora(self) -> LoraConfig:
        """Experts get no adapters: they are no linear layers."""
        targets = ("q_proj", "o_proj") if self.mixture else ("all-linear",)
        return LoraConfig(rank=self.rank, alpha=6, targets=targets, dropout=self.dropout)

    @property
    def source(self) -> ModelSource:
        return ModelSource(str(self.folder), str(self.folder), adapters=self.merged)

    @property
    def config(self) -> TrainConfig:
        return TrainConfig(**{"lr": 1e-2, "micro_batch_tokens": 64, "clip_grad_norm": 0.05, **self.settings})


def sharded(group: RankGroup, wanted: Adapted) -> ShardedStrategy:
    built = build_sharded(wanted.source, "policy", wanted.dtype, SEED, group, lora=wanted.lora)
    if wanted.learned:
        learn(built.model, wanted.dtype)
    return ShardedStrategy(built, wanted.config, group, tokenizer=character_tokenizer())


def single(wanted: Adapted) -> SingleStrategy:
    model = load_model(wanted.source, wanted.dtype, SEED)
    if wanted.dtype == FP64 and wanted.mixture:
        model.set_experts_implementation("eager")  # grouped matrix products have no fp64
    adapters = Adapters(model, wanted.lora, wanted.source.base(SEED), SEED)
    if wanted.learned:
        learn(model, wanted.dtype)
    return SingleStrategy(model, character_tokenizer(), wanted.config, adapters=adapters)


@torch.no_grad()
def learn(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Adapters that change much, the same however they are cut."""
    noise = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            drawn = (torch.randn(parameter.shape, generator=noise) * 0.2).to(dtype)
            _copy(parameter, drawn.__getitem__)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def saved(kind: str) -> Path:
        path = tmp_path_factory.mktemp(kind)
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=FP32).save_pretrained(path)
        return path

    return saved


BATCH = Groups(seed=2, groups=3, most_samples=3, turns=2)


def state(group: RankGroup, wanted: Adapted) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What is trained and what is not, each put together from all ranks."""
    return _state(sharded(group, wanted))


def _state(trainer: SingleStrategy | ShardedStrategy) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    held = {name: (whole(p.detach()), p.requires_grad) for name, p in trainer.model.named_parameters()}
    return {n: t for n, (t, learns) in held.items() if learns}, {n: t for n, (t, learns) in held.items() if not learns}


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("kind", "rank"), [("llama", 3), ("tied", 1), ("qwen3_moe", 4)])
def test_they_begin_as_in_one_process(
    two: Ranks, folders: Callable[[str], Path], kind: str, rank: int, dtype: torch.dtype
) -> None:
    """With rank 1, one of two ranks holds nothing of the matrices A."""
    wanted = Adapted(folders(kind), dtype, rank=rank, learned=False)
    trained, frozen = _state(single(wanted))
    assert {tensor.dtype for tensor in (*trained.values(), *frozen.values())} == {dtype}
    assert any(tensor.any() for tensor in trained.values())
    for found, base in two.run(state, wanted):
        assert found.keys() == trained.keys()
        assert {tensor.dtype for tensor in found.values()} == {FP32}, "they are masters"
        assert all(torch.equal(found[name], tensor.float()) for name, tensor in trained.items())
        assert {tensor.dtype for tensor in base.values()} == {dtype}, "what is frozen takes no more than it must"
        assert base.keys() == frozen.keys()
        assert all(torch.equal(base[name], tensor) for name, tensor in frozen.items())


def test_they_are_trained_beside_adapters_that_are_merged(
    two: Ranks, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    single(Adapted(folders("llama"))).save(tmp_path)
    wanted = Adapted(folders("llama"), merged=(str(tmp_path / "model"),), rank=2, learned=False)
    trained, frozen = _state(single(wanted))
    plain = _state(single(Adapted(folders("llama"))))[1]
    assert not same(frozen, plain)
    for found, base in two.run(state, wanted):
        assert same(found, trained)
        assert same(base, frozen)


def work(group: RankGroup, wanted: Adapted, batch: Batch) -> tuple[FloatArray, FloatArray, Gradients, float, float]:
    return _work(sharded(group, wanted), batch)


def _work(
    trainer: SingleStrategy | ShardedStrategy, batch: Batch
) -> tuple[FloatArray, FloatArray, Gradients, float, float]:
    """Log-probs with adapters and without, gradients, and the loss and the norm of an update."""
    now, base = trainer.log_probs(batch), trainer.log_probs(batch, base=True)
    optimizer, kept = trainer._optimizer, Kept(trainer.model, trainer._config)
    trainer._optimizer = kept
    trainer.update(batch, KL, 0)
    trainer._optimizer = optimizer
    stats = trainer.update(batch, KL, 0)
    return now, base, kept.kept[0], stats.loss, stats.grad_norm


def check(ranks: Ranks, wanted: Adapted, batch: Batch) -> None:
    """All ranks have the log-probs and the gradients of one process. In a dense model in fp64 gradients differ by the
    rounding of the masters, which are fp32; in fp32 ranks are no further from the gradient in fp64 than twice what one
    process is."""
    exact = replace(wanted, dtype=FP64)
    expected, (now, base, gradients, loss, norm) = _work(single(exact), batch)[2], _work(single(wanted), batch)
    assert np.abs(now - base).max() > 0.1
    for found in () if wanted.mixture else ranks.run(work, exact, batch):
        assert max(errors(found[2], expected).values()) < 5e-7
    lost = errors(gradients, expected)
    for found in ranks.run(work, wanted, batch):
        np.testing.assert_allclose(found[0], now, atol=2e-5)
        np.testing.assert_allclose(found[1], base, atol=2e-5)
        for name, error in errors(found[2], expected).items():
            assert error < max(TOLERANCE, 2 * lost[name]), name
        assert found[3:] == pytest.approx((loss, norm), rel=1e-5)


@pytest.mark.parametrize("kind", ["tied", "qwen3_moe"])
def test_ranks_have_the_gradient_of_one_process(ranks: Ranks, folders: Callable[[str], Path], kind: str) -> None:
    check(ranks, Adapted(folders(kind)), make_batch(BATCH, "qwen3"))


def moves(group: RankGroup, wanted: Adapted, batch: Batch, folder: Path) -> dict[str, Any]:
    """What a trainer has after two updates, which it saves, and what after one more."""
    trainer = sharded(group, wanted)
    for step in range(2):
        trainer.update(batch, KL, step)
    trainer.save(folder)
    trainer.saved()
    found = _seen(trainer)
    trainer.update(batch, KL, 2)
    return {**found, "next": _state(trainer)[0]}


def resumes(group: RankGroup, wanted: Adapted, batch: Batch, folder: Path) -> dict[str, Any]:
    """The same of a trainer that begins from what was saved."""
    trainer = sharded(group, wanted)
    trainer.load(folder)
    found = _seen(trainer)
    trainer.update(batch, KL, 2)
    return {**found, "next": _state(trainer)[0]}


def _seen(trainer: ShardedStrategy) -> dict[str, Any]:
    assert trainer._optimizer is not None
    sender = Sender(trainer.published(), 1 << 12)
    published = sender.manifest(1, torch.zeros(1), torch.zeros(1)).digests
    kept = {name: whole(tensor.detach()).clone() for name, tensor in trainer._optimizer.state().items()}
    return {"published": published, "state": kept}


@pytest.mark.parametrize("dtype", but([BF16], [FP32, BF16]))
@pytest.mark.parametrize("kind", but({"qwen3_moe"}, ["llama", "qwen3_moe"]))
def test_they_are_published_saved_and_resumed_as_in_one_process(
    two: Ranks, folders: Callable[[str], Path], tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    wanted, batch = Adapted(folders(kind), dtype), make_batch(BATCH, "qwen3")
    before = two.run(moves, wanted, batch, tmp_path / "two")
    for again in two.run(resumes, wanted, batch, tmp_path / "two"):
        assert again["published"] == before[0]["published"]
        assert same(again["state"], before[0]["state"])
        assert same(again["next"], before[0]["next"]), "on as many ranks it goes on in the same bits"
    one = single(wanted)
    one.load(tmp_path / "two")
    assert one._optimizer is not None
    assert same(one._optimizer.state(), before[0]["state"])
    assert digests(one.published()) == before[0]["published"]
    one.save(tmp_path / "one")
    written = [load_file(tmp_path / name / "model" / "adapter_model.safetensors") for name in ("one", "two")]
    assert same(*written)
    assert settings_in(tmp_path / "two" / "model") == settings_in(tmp_path / "one" / "model")
    for back in two.run(resumes, wanted, batch, tmp_path / "one"):
        assert same(back["state"], before[0]["state"])
        assert same(back["next"], before[0]["next"])


def settings_in(folder: Path) -> tuple[dict[str, Any], str]:
    """What is beside adapters' weights; `peft` writes the names of layers in any order."""
    config = json.loads((folder / "adapter_config.json").read_text())
    return {**config, "target_modules": sorted(config["target_modules"])}, (folder / "roll_base.json").read_text()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], tensor) for name, tensor in other.items())


def test_experts_in_one_tensor_are_refused_and_other_targets_named() -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_moe"])
    with pytest.raises(
        UserError, match=r"mlp.experts is no linear layer \(Qwen3MoeExperts\).*: write some of k_proj, o_proj, q_proj"
    ):
        inject(model, LoraConfig(rank=2))


def dropped(group: RankGroup, wanted: Adapted, batch: Batch) -> tuple[list[Gradients], Tensor]:
    """Gradients of steps 0, 0 and 1, and noise of step 0."""
    found: list[Gradients] = []
    for step in (0, 0, 1):
        trainer = sharded(group, wanted)
        trainer._optimizer = kept = Kept(trainer.model, wanted.config)
        trainer.update(batch, KL, step)
        found += kept.kept
    assert trainer._adapters is not None
    with trainer._adapters.dropping(0, group.device, group.rank):
        return found, torch.rand(8)


def test_what_is_dropped_comes_from_seed_step_and_rank(two: Ranks, folders: Callable[[str], Path]) -> None:
    wanted, batch = Adapted(folders("llama"), dropout=0.5), make_batch(BATCH, "qwen3")
    (first, noise), (_, other) = two.run(dropped, wanted, batch)
    assert same(first[0], first[1])
    assert not same(first[0], first[2])
    assert not torch.equal(noise, other)
    alone = single(wanted)
    assert alone._adapters is not None
    with alone._adapters.dropping(0, torch.device("cpu")):
        assert torch.equal(torch.rand(8), noise), "one rank alone drops as one process does"
