"""A trainer sends rows to the experts that the sampler sent them to."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from roll.algorithm import LossSpec
from roll.data import Batch
from roll.data.routes import to_signed
from roll.engine.routes import RouteRecorder
from roll.model.routing import Routers
from tests.strategy.train.sharded.trainers import (
    MIXTURES,
    Groups,
    Job,
    errors,
    make_batch,
    make_model,
    single_trainer,
    single_update,
    with_routes,
)

SPEC = LossSpec("nll")


def plain_log_probs(kind: str, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The sampled tokens' log-probs of samples that are computed one by one, with the experts of the batch weighed by
    formulas written here, and the gradients of the mean of their negatives."""
    model = make_model(kind)
    model.set_attn_implementation("sdpa")
    routers = Routers(model)
    now: list[Tensor] = []

    def replaced(layer: int, router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, _, choices = output
        given = now[0][:, layer * routers.chosen : (layer + 1) * routers.chosen]
        choices = torch.where(given < 0, choices, given)
        scores = torch.sigmoid(logits) if kind == "deepseek_v3" else torch.softmax(logits, -1)
        weights = scores.gather(1, choices)
        if getattr(router, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights * getattr(router, "routed_scaling_factor", 1.0), choices

    for layer, router in enumerate(routers.modules):
        router.register_forward_hook(partial(replaced, layer))
    found = []
    rows = zip(batch.rows("ids"), batch.rows("loss_mask"), batch.rows("routes"), batch["temperature"], strict=True)
    for ids, mask, routes, heat in rows:
        if mask.any():
            now[:] = [torch.from_numpy(to_signed(routes).astype(np.int64))]
            tokens = torch.from_numpy(ids.astype(np.int64))
            logs = torch.log_softmax(model(tokens[None]).logits[0].float() / float(heat), -1)
            found.append(logs[:-1].gather(1, tokens[1:, None])[:, 0][torch.from_numpy(mask[1:])])
    flat = torch.cat(found)
    (-flat.mean()).backward()
    return flat.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", MIXTURES)
def test_log_probs_and_gradients_are_those_of_the_samplers_experts(kind: str) -> None:
    """With shared prefixes, several micro-batches, activations computed again, and some rows that are not known."""
    batch = with_routes(make_batch(Groups(seed=1, turns=1), kind), kind)
    batch = batch.with_columns(advantage=np.ones(len(batch)))
    expected, gradients = plain_log_probs(kind, batch)
    for checkpointing in ("off", "on"):
        job = Job(batch, SPEC, kind, extra_rows=10, settings={"activation_checkpointing": checkpointing})
        found = single_trainer(job).log_probs(batch)[batch.loss_mask]
        np.testing.assert_allclose(found, expected, atol=2e-5)
        assert max(errors(single_update(job).gradients[0], gradients).values()) < 2e-5


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_trainer_that_chooses_the_same_computes_the_same(kind: str) -> None:
    batch = make_batch(Groups(seed=2, turns=1), kind)
    model = make_model(kind)
    model.set_attn_implementation("sdpa")
    recorder = RouteRecorder(model)
    with torch.no_grad():
        parts = [torch.from_numpy(ids.astype(np.int64)) for ids in batch.rows("ids")]
        routes = torch.cat([recorder.record(partial(model, ids[None]))[1] for ids in parts])
    recorded = batch.with_columns(routes=routes.numpy().astype(np.uint8))
    trainer = single_trainer(Job(batch, SPEC, kind))
    np.testing.assert_allclose(trainer.log_probs(recorded), trainer.log_probs(batch), atol=1e-6)
    other = with_routes(batch, kind)
    assert np.abs(trainer.log_probs(other) - trainer.log_probs(batch)).max() > 1e-3, "other experts compute otherwise"


def test_after_a_replay_the_model_chooses_for_itself() -> None:
    """An engine in the same process may use the same model."""
    batch = make_batch(Groups(seed=2, turns=1), "qwen3_moe")
    trainer = single_trainer(Job(batch, SPEC, "qwen3_moe"))
    before = trainer.log_probs(batch)
    trainer.log_probs(with_routes(batch, "qwen3_moe"))
    np.testing.assert_array_equal(trainer.log_probs(batch), before)


def test_a_frozen_model_chooses_for_itself() -> None:
    from roll.model.tiny import character_tokenizer
    from roll.strategy.train.single import SingleStrategy

    batch = make_batch(Groups(seed=2, turns=1), "qwen3_moe")
    config = Job(batch, SPEC, "qwen3_moe").config
    frozen = SingleStrategy(make_model("qwen3_moe"), character_tokenizer(), config, trainable=False)
    np.testing.assert_array_equal(frozen.log_probs(with_routes(batch, "qwen3_moe")), frozen.log_probs(batch))
