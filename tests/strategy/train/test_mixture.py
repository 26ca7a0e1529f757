"""The experts of a mixture in training: what its routers did is counted, and they are made to use experts evenly."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from roll.algorithm import LossSpec
from roll.algorithm.metric_names import OF_MIXTURE
from roll.config.errors import UserError
from roll.config.schema import TrainConfig
from roll.data import Batch
from roll.engine.routes import RouteRecorder
from roll.model.routing import RouterPass, Routers, router_weights_of
from roll.model.shard_loading import SafeFolder
from roll.model.tiny import character_tokenizer
from roll.strategy.train.mixture import BIAS, Mixture
from roll.strategy.train.single import SingleStrategy
from roll.weight_sync.merged_state_dict import published_tensors
from tests.strategy.train.sharded.trainers import (
    MIXTURES,
    Groups,
    Job,
    errors,
    make_batch,
    make_model,
    single_trainer,
    single_update,
)

SPEC = LossSpec("nll")
COEFFICIENT = 0.7


def job(kind: str, *, seed: int = 1, batch: Batch | None = None, **settings: Any) -> Job:
    given = make_batch(Groups(seed=seed, turns=1), kind) if batch is None else batch
    return Job(given, SPEC, kind, settings=settings, extra_rows=20)


def trained(batch: Batch) -> list[Tensor]:
    """The samples with a sampled token, each by itself."""
    rows = zip(batch.rows("ids"), batch.rows("loss_mask"), strict=True)
    return [torch.from_numpy(ids.astype(np.int64)) for ids, mask in rows if mask.any()]


def plain_balance_loss(kind: str, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    """By its formula, of samples that are computed one by one by the model's own forward pass, and its gradients."""
    model = make_model(kind)
    model.set_attn_implementation("sdpa")
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    routers = Routers(model)
    for router in routers.modules:
        router.register_forward_hook(lambda _, __, output: seen.append(output))
    samples = trained(batch)
    total = torch.zeros(())
    for ids in samples:
        seen.clear()
        model(ids[None])
        for logits, _, choices in seen:
            scores = torch.sigmoid(logits) if kind == "deepseek_v3" else torch.softmax(logits, -1)
            shares = (scores / scores.sum(-1, keepdim=True)).mean(0)
            used = torch.nn.functional.one_hot(choices, routers.experts).sum((0, 1))
            total = total + (used * routers.experts / (routers.chosen * len(ids)) * shares).sum()
    total = total / (len(samples) * routers.layers)
    total.backward()
    return float(total.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", MIXTURES)
def test_the_balance_loss_is_its_formula_over_samples(kind: str) -> None:
    """With several micro-batches and shared prefixes, also where activations are computed again."""
    batch = make_batch(Groups(seed=3, turns=1), kind)
    loss, expected = plain_balance_loss(kind, batch)
    without = single_update(job(kind, batch=batch))
    for checkpointing in ("off", "on"):
        settings = {"router_balance_loss": COEFFICIENT, "activation_checkpointing": checkpointing}
        found = single_update(job(kind, batch=batch, **settings))
        assert found.metrics["router_balance_loss"] == pytest.approx(COEFFICIENT * loss, rel=1e-5)
        assert found.loss == pytest.approx(without.loss, rel=1e-6), "the policy's loss is told apart from it"
        added = {name: found.gradients[0][name] - without.gradients[0][name] for name in expected}
        wanted = {name: COEFFICIENT * gradient for name, gradient in expected.items()}
        scale = max(float(gradient.norm()) for gradient in wanted.values())
        for name, gradient in wanted.items():
            assert float((added[name] - gradient).norm()) < 1e-5 * scale, name


def test_a_loss_lowers_what_it_measures() -> None:
    trainer = single_trainer(job("mixtral", router_balance_loss=10.0, lr=1e-2, schedule="constant", clip_grad_norm=1.0))
    batch = make_batch(Groups(seed=5, turns=1), "mixtral")
    losses = [trainer.update(batch, SPEC, step).metrics["router_balance_loss"] for step in range(8)]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("kind", MIXTURES)
def test_metrics_are_those_of_all_tokens(kind: str) -> None:
    batch = make_batch(Groups(seed=4, turns=1), kind)
    found = single_update(Job(batch, SPEC, kind))
    model = make_model(kind)
    model.set_attn_implementation("sdpa")
    routers, load, entropy, rows = Routers(model), 0.0, 0.0, 0
    counts = torch.zeros(routers.layers, routers.experts)
    for ids in trained(batch):
        asked = RouterPass(uses=torch.ones(len(ids)))
        with torch.no_grad(), routers.within(asked):
            model(ids[None])
        for layer in range(routers.layers):
            counts[layer] += asked.load[layer]
            entropy += float(asked.entropy[layer])
        rows += len(ids)
    load = float((counts.amax(1) / counts.mean(1)).max())
    assert found.metrics["expert_load_max"] == pytest.approx(load)
    assert found.metrics["experts_idle"] == pytest.approx(float((counts == 0).float().mean()))
    assert found.metrics["router_entropy"] == pytest.approx(entropy / rows / routers.layers, rel=1e-5)
    assert found.metrics["dropped_tokens"] == 0
    assert float(counts.sum()) == rows * routers.chosen * routers.layers


def test_a_mixture_alone_has_the_metrics_of_mixtures() -> None:
    assert single_update(job("qwen3")).metrics.keys().isdisjoint(OF_MIXTURE)
    assert single_update(job("mixtral")).metrics.keys() >= OF_MIXTURE


def test_biases_move_towards_experts_with_few_rows_and_are_published() -> None:
    batch = make_batch(Groups(seed=6, turns=1), "deepseek_v3")
    trainer = single_trainer(job("deepseek_v3", batch=batch, router_bias_rate=0.01, lr=1e-9))
    routers = Routers(trainer.model)
    model = make_model("deepseek_v3")
    model.set_attn_implementation("sdpa")
    recorder = RouteRecorder(model)
    with torch.no_grad():
        choices = [recorder.record(partial(model, ids[None]))[1] for ids in trained(batch)]
    load = torch.bincount(torch.cat(choices).flatten(), minlength=8)
    trainer.update(batch, SPEC, 0)
    expected = 0.01 * torch.sign(load.float().mean() - load)
    bias: Any = getattr(routers.modules[0], BIAS)
    torch.testing.assert_close(bias, expected)
    published = published_tensors(trainer.model)
    assert any(name.endswith(BIAS) and torch.equal(tensor, bias) for name, tensor in published.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_are_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    made = job("deepseek_v3", router_bias_rate=0.01)
    trainer, other = (
        SingleStrategy(make_model(made.kind).to(dtype), character_tokenizer(), made.config) for _ in range(2)
    )
    trainer.update(made.batch, SPEC, 0)
    trainer.save(tmp_path)
    with patch.object(SafeFolder, "whole", autospec=True, side_effect=SafeFolder.whole) as reading:
        other.load(tmp_path)
    experts = {call.args[1] for call in reading.call_args_list if ".experts.0." in call.args[1]}
    assert bool(experts) == (dtype == torch.float32), "in 16 bits the masters are read, and of the model only buffers"
    for saved, loaded in zip(Routers(trainer.model).modules, Routers(other.model).modules, strict=True):
        assert torch.equal(getattr(saved, BIAS), getattr(loaded, BIAS))
        assert getattr(loaded, BIAS).abs().sum() > 0


def test_models_without_experts_or_bias_are_refused() -> None:
    with pytest.raises(UserError, match="router_balance_loss: the model has no experts"):
        Mixture(make_model("qwen3"), TrainConfig(router_balance_loss=0.1))
    with pytest.raises(UserError, match="router_bias_rate: the model has no experts"):
        Mixture(make_model("qwen3"), TrainConfig(router_bias_rate=0.1))
    with pytest.raises(UserError, match="router_bias_rate: adapters leave"):
        Mixture(make_model("deepseek_v3"), TrainConfig(router_bias_rate=0.1), adapted=True)
    with pytest.raises(UserError, match="router_bias_rate: the model has routers without a bias"):
        Mixture(make_model("mixtral"), TrainConfig(router_bias_rate=0.1))


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_chosen_experts_are_the_routers_own(kind: str, dtype: torch.dtype) -> None:
    model = make_model(kind).to(dtype)
    router = Routers(model).modules[0]
    hidden = torch.randn(50, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits, weights, choices = router(hidden)
    found = router_weights_of(router, logits, weights, choices).weights(logits, choices)
    torch.testing.assert_close(found.to(weights.dtype), weights)


def test_a_router_that_weighs_otherwise_is_refused() -> None:
    router = Routers(make_model("mixtral")).modules[0]
    logits, weights, choices = router(torch.randn(50, 32, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(UserError, match="MixtralTopKRouter weighs its experts is not known"):
        router_weights_of(router, logits, weights.sqrt(), choices)


def test_a_router_whose_weights_are_small_is_refused_too() -> None:
    """Half of the softmax over 256 experts, in 16 bits: the difference is less than the rounding of larger weights."""
    router = Routers(make_model("mixtral")).modules[0]
    logits = torch.randn(50, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights, choices = torch.softmax(logits.float(), -1).topk(2)
    assert not router_weights_of(router, logits, weights.bfloat16(), choices).normalised
    with pytest.raises(UserError, match="MixtralTopKRouter weighs its experts is not known"):
        router_weights_of(router, logits, (weights / 2).bfloat16(), choices)


def test_the_same_gradient_whatever_the_micro_batches() -> None:
    batch = make_batch(Groups(seed=7), "qwen3_moe")
    settings = {"router_balance_loss": COEFFICIENT}
    one = single_update(Job(batch, SPEC, "qwen3_moe", settings=settings))
    many = single_update(Job(batch, SPEC, "qwen3_moe", settings=settings, extra_rows=0))
    assert max(errors(many.gradients[0], one.gradients[0]).values()) < 2e-6


def test_routers_that_do_not_say_what_they_choose_are_left_alone_or_refused_by_name() -> None:
    routers = Routers(make_model("mixtral"))
    kind: Any = type(routers.modules[0])
    forward = kind.forward
    asked, hidden = RouterPass(uses=torch.ones(3)), torch.randn(3, 32)
    with patch.object(kind, "forward", lambda router, hidden: forward(router, hidden)[::-1]):
        with routers.within(asked):
            routers.modules[0](hidden)
        assert not asked.load
        with routers.within(RouterPass(routes=torch.zeros(3, 2, 2))), pytest.raises(UserError, match=kind.__name__):
            routers.modules[0](hidden)
