"""The trainer with adapters, against `peft`'s own forward and plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from test_single_strategy import (
    LOSS,
    WITH_KL,
    Gradients,
    assert_close,
    assert_same_bits,
    captured,
    make_batch,
    make_model,
    parameters,
    plain_gradients,
    plain_log_probs,
)
from transformers import LlamaForCausalLM

from roll.config.errors import RunError
from roll.config.schema import LoraConfig, TrainConfig
from roll.model import attention
from roll.model.lora import Adapters, BaseModelRef, is_adapter
from roll.model.tiny import character_tokenizer
from roll.strategy.train.single import SingleStrategy

__all__ = ["captured"]
LORA = LoraConfig(rank=4, alpha=6)
BASE = BaseModelRef("somewhere/model", 0)


def shake(model: LlamaForCausalLM, seed: int = 1) -> LlamaForCausalLM:
    """Adapters that have learned something."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.copy_(torch.randn(parameter.shape, generator=noise) * 0.2)
    return model


def adapted(
    lora: LoraConfig = LORA, *, base: BaseModelRef = BASE, dtype: torch.dtype = torch.float32, **settings: Any
) -> SingleStrategy:
    model = make_model(dtype=dtype)
    model.set_attn_implementation(attention.NAME)
    adapters = Adapters(model, lora, base, seed=3)
    strategy = SingleStrategy(model, character_tokenizer(), TrainConfig(**{"lr": 1e-2, **settings}), adapters=adapters)
    shake(model)
    return strategy


def by_peft(tmp_path: Path) -> PeftModel:
    """The same model as `peft` loads it, in the way of its own documentation."""
    adapted().save(tmp_path)
    loaded = PeftModel.from_pretrained(make_model(), tmp_path / "model", is_trainable=True)
    return loaded.eval()


def test_gradients_are_those_of_peft_and_plain_autograd(
    captured: Callable[..., tuple[float, Gradients]], tmp_path: Path
) -> None:
    plain = by_peft(tmp_path)
    batch = make_batch(2)
    with torch.no_grad():
        now = plain_log_probs(plain, batch).numpy()
    rng = np.random.default_rng(3)
    batch = batch.with_columns(**{name: now + rng.normal(0, 0.2, batch.tokens) for name in ("behaviour", "ref")})
    loss, expected = plain_gradients(plain, batch, WITH_KL)
    expected = {name.removeprefix("base_model.model."): gradient for name, gradient in expected.items()}
    assert expected
    assert all(map(is_adapter, expected))
    for limit in (0, 32):
        got_loss, got = captured(adapted(micro_batch_tokens=limit), batch, WITH_KL)
        assert got_loss == pytest.approx(loss, abs=1e-5)
        assert_close(got, expected, 2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_adapters_change(dtype: torch.dtype) -> None:
    strategy = adapted(dtype=dtype)
    before = parameters(strategy)
    assert {parameter.dtype for parameter in before.values()} == {dtype}
    strategy.update(make_batch(2), LOSS, 0)
    after = parameters(strategy)
    for name in before:
        assert torch.equal(before[name], after[name]) != is_adapter(name), name


def test_the_base_is_the_model_without_adapters() -> None:
    batch, strategy = make_batch(1), adapted()
    with torch.no_grad():
        expected = plain_log_probs(make_model(), batch).numpy()
    now = strategy.log_probs(batch)
    base = strategy.log_probs(batch, base=True)
    np.testing.assert_allclose(base[batch.loss_mask], expected[batch.loss_mask], atol=1e-4, rtol=0)
    assert np.abs(now - base).max() > 0.1
    np.testing.assert_array_equal(strategy.log_probs(batch), now, "they are on again")
    assert strategy.update(batch, LOSS, 0).grad_norm > 0


def test_fresh_adapters_change_nothing_and_come_from_the_seed() -> None:
    models = [make_model() for _ in range(3)]
    for model, seed in zip(models, (3, 3, 4), strict=True):
        torch.manual_seed(seed + 10)
        Adapters(model, LORA, BASE, seed)
    batch = make_batch(1)
    with torch.no_grad():
        assert torch.equal(plain_log_probs(models[0], batch), plain_log_probs(make_model(), batch))
    first, same, other = (dict(model.named_parameters()) for model in models)
    drawn = [name for name in first if ".lora_A." in name]
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in drawn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_holds_adapters_alone_and_goes_on_in_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    straight, interrupted = adapted(dtype=dtype), adapted(dtype=dtype)
    for strategy in (straight, interrupted):
        strategy.update(make_batch(2), LOSS, 0)
    interrupted.save(tmp_path)
    files = {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*") if file.is_file()}
    assert {"model/adapter_model.safetensors", "model/adapter_config.json", "optimizer.safetensors"} <= files
    assert "model/model.safetensors" not in files
    whole = sum(p.nbytes for p in straight.model.parameters())
    learned = sum(p.nbytes for p in straight.model.parameters() if p.requires_grad)
    assert (tmp_path / "model" / "adapter_model.safetensors").stat().st_size < learned + 10_000 < whole + 10_000
    resumed = adapted(dtype=dtype)
    resumed.load(tmp_path)
    assert_same_bits(parameters(resumed), parameters(interrupted))
    for strategy in (straight, resumed):
        strategy.update(make_batch(5), LOSS, 1)
    assert_same_bits(parameters(resumed), parameters(straight))


def test_adapters_of_another_base_are_refused(tmp_path: Path) -> None:
    def of(path: str) -> SingleStrategy:
        return adapted(base=BaseModelRef(path, 0))

    of("/home/a/runs/a/checkpoints/step-000010/model").save(tmp_path)
    of("/home/b/runs/a/checkpoints/step-000010/model").load(tmp_path)
    with pytest.raises(RunError, match=r"belong to .*step-000010.* is now .*step-000020"):
        of("/home/a/runs/a/checkpoints/step-000020/model").load(tmp_path)


@pytest.mark.parametrize("checkpointing", ["on", "off"])
def test_dropout_is_in_updates_alone_and_repeats(
    captured: Callable[..., tuple[float, Gradients]], checkpointing: str
) -> None:
    """What is dropped comes from the seed and the step, also where activations are computed twice."""
    batch = make_batch(2)
    lora = LORA.model_copy(update={"dropout": 0.5})
    strategy = adapted(lora, activation_checkpointing=checkpointing)
    np.testing.assert_array_equal(strategy.log_probs(batch), adapted().log_probs(batch))
    torch.manual_seed(0)
    loss, first = captured(strategy, batch, LOSS)
    torch.manual_seed(1)
    again, second = captured(strategy, batch, LOSS)
    assert loss == again
    assert_same_bits(first, second)
    _, whole = captured(adapted(), batch, LOSS)
    _, other_way = captured(adapted(lora, activation_checkpointing="off"), batch, LOSS)
    assert_close(first, other_way, 1e-6)
    assert max(float((first[name] - whole[name]).norm()) for name in whole) > 1e-3
    np.testing.assert_array_equal(strategy.log_probs(batch), adapted().log_probs(batch))
