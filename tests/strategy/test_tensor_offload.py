"""Laying a role aside and bringing it back changes where its tensors are, and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from roll.algorithm import CorrectionSpec, LossSpec
from roll.config.schema import TrainConfig
from roll.data import Batch, Sample, Task
from roll.model import attention
from roll.model.tiny import character_tokenizer
from roll.strategy.infer.native import NativeStrategy
from roll.strategy.offload import Residency, TensorOffloader
from roll.strategy.train.single import SingleStrategy
from roll.weight_sync.stream import Sender, WeightManifest
from roll.weight_sync.weights import named_tensors

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LOSS = LossSpec("clipped", {"clip_low": 0.2, "clip_high": 0.3}, correction=CorrectionSpec())
ORDER: tuple[Residency, ...] = ("weights", "none", "all", "none", "weights", "all")


def model_of(device: str, dtype: torch.dtype) -> LlamaForCausalLM:
    shape = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = LlamaForCausalLM(shape).to(dtype).eval()
    model.set_attn_implementation(attention.NAME)
    return model.to(device)


def batch_of(seed: int) -> Batch:
    chance = np.random.default_rng(seed)
    samples = []
    for number in range(4):
        sample = Sample(f"0.{number}", Task.ask("t", "q"), 0, 1.0, reward=float(number))
        sample.log.prompt(chance.integers(1, 90, 5))
        sample.log.respond(chance.integers(1, 90, 6), np.full(6, -2.0), np.zeros(6, np.int32))
        samples.append(sample)
    return Batch.from_samples(samples).with_columns(advantage=np.array([-1.5, -0.5, 0.5, 1.5]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trainer_goes_on_as_if_it_had_stayed(device: str, dtype: torch.dtype) -> None:
    weights = []
    for moves in (False, True):
        trainer = SingleStrategy(model_of(device, dtype), character_tokenizer(), TrainConfig(lr=1e-2))
        for step in range(3):
            trainer.update(batch_of(step), LOSS, step)
            for level in ORDER if moves else ():
                trainer.set_residency(level)
                here = {tensor.device.type for tensor in trainer.model.parameters()}
                assert here == {"cpu" if level == "none" else device}
                own = trainer._optimizer.tensors() if trainer._optimizer is not None else {}
                assert own
                assert {t.device.type for t in own.values()} == {device if level == "all" else "cpu"}
        weights.append({name: tensor.cpu() for name, tensor in trainer.model.named_parameters()})
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.gpu
def test_what_is_laid_aside_frees_the_gpu_and_uses_its_host_memory_again() -> None:
    tensor = torch.randn(1 << 20, device="cuda")
    before, values, shelf = torch.cuda.memory_allocated(), tensor.cpu(), TensorOffloader(torch.device("cuda"))
    shelf.offload({"x": tensor})
    assert torch.cuda.memory_allocated() <= before - (4 << 20)
    place = tensor.data_ptr()
    assert tensor.is_pinned()
    shelf.onload({"x": tensor})
    assert torch.equal(tensor.cpu(), values)
    shelf.offload({"x": tensor})
    assert tensor.data_ptr() == place


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("late", [False, True], ids=["", "made-when-weights-come"])
def test_an_engine_receives_weights_after_it_was_laid_aside(device: str, late: bool) -> None:
    trainer = SingleStrategy(model_of(device, torch.float32), character_tokenizer(), TrainConfig(lr=1e-2))
    own = [model_of(device, torch.float32)]
    how: dict[str, Any] = {"make_model": own.pop} if late else {"model": own.pop()}  # made once, or it would be empty
    engine = NativeStrategy(character_tokenizer(), max_running=4, exact=False, **how)
    for version in range(3):
        trainer.update(batch_of(version), LOSS, version)
        for level in ORDER:
            asyncio.run(engine.set_residency(level))
        manifest = _manifest(trainer, version)
        tensors = engine.begin_loading(manifest)
        with torch.no_grad():
            for name, tensor in named_tensors(trainer.model).items():
                tensors[name].copy_(tensor)
        asyncio.run(engine.end_loading(manifest))
        assert engine.engine.version == version


def _manifest(trainer: SingleStrategy, version: int) -> WeightManifest:
    weights = trainer.weights(version)
    return Sender(named_tensors(trainer.model), 1 << 20).manifest(version, weights.probe, weights.log_probs)
