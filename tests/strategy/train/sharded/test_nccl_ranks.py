"""Ranks that talk by NCCL: all of them on one GPU, each as if it were a host of its own (`tests.ranks`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from roll.algorithm import LossSpec
from roll.cluster.mesh import MeshShape
from roll.model.tiny import character_tokenizer
from roll.strategy.train.optimizer import OptimizerStep
from roll.strategy.train.sharded.process_group import RankGroup
from roll.strategy.train.single import SingleStrategy
from roll.weight_sync.stream import Sender
from tests.ranks import Ranks, ranks_of
from tests.strategy.train.sharded.trainers import (
    Gradients,
    Groups,
    Job,
    make_batch,
    make_model,
    sharded_trainer,
    sharded_update,
    single_trainer,
    single_update,
    whole,
    with_routes,
)

pytestmark = pytest.mark.gpu

LAYOUTS = {"two shards": MeshShape(shard=2), "two replicas of two": MeshShape(replicate=2, shard=2)}
DIVIDED = {
    "tensor 2": (MeshShape(tensor=2), "qwen3"),
    "context 2": (MeshShape(context=2), "qwen3"),
    "expert 2": (MeshShape(shard=2, expert=2), "qwen3_moe"),
    "tensor 2, expert 2": (MeshShape(shard=2, tensor=2, expert=2), "qwen3_moe"),
    "context 2, expert 4": (MeshShape(shard=2, context=2, expert=4), "uneven"),
}
"""Layouts that divide rows, layers or experts, each with a model of which they divide something."""
MIXTURES = ("qwen3_moe", "uneven")
LOSS = LossSpec("clipped", {"clip_low": 0.2, "clip_high": 0.3})


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with ranks_of(LAYOUTS[request.param], device="cuda:0") as made:
        yield made


def make_job(kind: str) -> Job:
    batch = make_batch(Groups(groups=5), kind)
    return Job(batch, LOSS, kind, extra_rows=0, settings={"lr": 0.01, "schedule": "constant", "compile": "off"})


def life(group: RankGroup, kind: str, folder: Path) -> dict[str, Any]:
    """What a trainer does in a run: updates, a turn off its GPU, a publish, a checkpoint in the background, an update
    that is not finite, and the checkpoint again."""
    job = make_job(kind)
    trainer = sharded_trainer(group, job)
    found: dict[str, Any] = {"log_probs": trainer.log_probs(job.batch)}
    found["first"] = trainer.update(job.batch, job.spec, 0)
    for level in ("none", "weights", "all"):
        trainer.set_residency(level)  # type: ignore[arg-type]
    trainer.set_residency("weights")
    found["probe"] = trainer.probe()[1]
    sender = Sender(trainer.published(), 1 << 12)
    found["digests"] = sender.manifest(1, *trainer.probe()).digests
    if group.is_first:
        sender.open("shared_memory", len(sender.layout.buckets))
        for bucket in range(len(sender.layout.buckets)):
            sender.write(bucket)
        sender.close()
    else:
        sender.contribute_all()
    trainer.set_residency("all")
    trainer.save(folder)
    found["second"] = trainer.update(job.batch, job.spec, 1)
    found["files"] = trainer.saved()
    weights = {name: whole(weight.detach()).cpu() for name, weight in trainer.model.named_parameters()}
    bad = job.batch.with_columns(advantage=np.full(len(job.batch), np.nan))
    found["skipped"] = trainer.update(bad, job.spec, 2).skipped
    trainer.load(folder)
    found["again"] = trainer.update(job.batch, job.spec, 1)
    found["weights"] = weights
    found["same"] = all(
        torch.equal(whole(weight.detach()).cpu(), weights[name]) for name, weight in trainer.model.named_parameters()
    )
    return found


@pytest.mark.parametrize("kind", ["qwen3", "tied"])
def test_a_trainer_over_nccl_does_in_its_life_what_one_process_does(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    check_life(ranks, kind, tmp_path)


def check_life(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    found, job = ranks.run(life, kind, tmp_path), make_job(kind)
    first = found[0]
    for other in found[1:]:
        assert other["digests"] == first["digests"]
        assert all(torch.equal(other["weights"][name], weight) for name, weight in first["weights"].items())
    assert all(each["same"] and each["skipped"] == 1 for each in found)
    assert first["again"].loss == first["second"].loss
    assert len({name for each in found for name in each["files"]}) == ranks.shape.copy + 1
    single = single_trainer(job)
    assert np.abs(single.log_probs(job.batch) - first["log_probs"]).max() < 1e-3
    for step, name in enumerate(("first", "second")):
        expected, stats = single.update(job.batch, job.spec, step), first[name]
        assert stats.loss == pytest.approx(expected.loss, rel=1e-3, abs=1e-4)
        assert stats.grad_norm == pytest.approx(expected.grad_norm, rel=1e-3)
        assert stats.tokens == expected.tokens
    for name, weight in single.model.named_parameters():
        assert torch.allclose(weight, first["weights"][name], rtol=0.02, atol=2e-3), name


@pytest.fixture(scope="module", params=DIVIDED)
def divided(request: pytest.FixtureRequest) -> Iterator[tuple[Ranks, str]]:
    shape, kind = DIVIDED[request.param]
    with ranks_of(shape, device="cuda:0") as made:
        yield made, kind


def test_divided_trainers_live_alike(divided: tuple[Ranks, str], tmp_path: Path) -> None:
    check_life(*divided, tmp_path)


def gradients(group: RankGroup, job: Job) -> Gradients:
    return on_host(sharded_update(group, job).gradients[0])


def rounded_gradients(job: Job) -> Gradients:
    """Of one process on the GPU, in bf16."""
    model = make_model(job.kind).to(torch.bfloat16).to("cuda")
    trainer = SingleStrategy(model, character_tokenizer(), job.config)
    optimizer, found = trainer._optimizer, {}
    assert optimizer is not None

    def keep(step: int, loss: Tensor | None = None) -> OptimizerStep:
        found.update(on_host(optimizer.gradients()))
        return OptimizerStep(1.0, True)

    optimizer.step = keep  # type: ignore[method-assign]
    trainer.update(job.batch, job.spec, 0)
    return found


def on_host(found: Gradients) -> dict[str, Tensor]:
    return {name: gradient.float().cpu() for name, gradient in found.items()}


def distance(found: Gradients, expected: Gradients) -> float:
    """Of all gradients together, relative: a single small one may be mostly rounding in bf16."""
    assert found.keys() == expected.keys()
    off = sum(float((found[name].double() - right.double()).square().sum()) for name, right in expected.items())
    return float((off / sum(float(right.double().square().sum()) for right in expected.values())) ** 0.5)


def test_divided_over_ranks_the_gradient_is_that_of_one_process(divided: tuple[Ranks, str]) -> None:
    """In fp32, with several micro-batches."""
    ranks, kind = divided
    job = Job(make_batch(Groups(seed=3), kind), LOSS, kind, extra_rows=3, settings={"compile": "off"})
    expected = on_host(single_update(job).gradients[0])
    for found in ranks.run(gradients, job):
        assert distance(found, expected) < 1e-5


@pytest.mark.parametrize("compiled", ["off", "auto"])
def test_in_bf16_it_is_no_further_from_fp32_than_one_process_is(divided: tuple[Ranks, str], compiled: str) -> None:
    """Also with compiled layers, where they can be: `auto` leaves those as they are that are divided over `tensor`.

    Mixtures replay one choice of experts: left to themselves, routers that round differently choose differently, and one
    token at another expert moves the gradient by more than all rounding.
    """
    ranks, kind = divided
    batch = make_batch(Groups(seed=5), kind)
    if kind in MIXTURES:
        batch = with_routes(batch, kind, unknown=0.0)
    exact = on_host(single_update(Job(batch, LOSS, kind, settings={"compile": "off"})).gradients[0])
    job = Job(batch, LOSS, kind, torch.bfloat16, settings={"compile": compiled})
    allowed = 1.5 * distance(rounded_gradients(job), exact)
    for found in ranks.run(gradients, job):
        assert 0 < distance(found, exact) < allowed
