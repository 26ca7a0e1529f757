"""Ranks that talk by NCCL: all of them on one GPU, each as if it were a host of its own (`tests.ranks`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roll.algorithm import LossSpec
from roll.cluster.mesh import MeshShape
from roll.strategy.train.sharded.group import RankGroup
from roll.transfer.stream import Sender
from tests.ranks import Ranks, ranks_of
from tests.strategy.train.sharded.trainers import Groups, Job, make_batch, sharded_trainer, single_trainer, whole

pytestmark = pytest.mark.gpu

LAYOUTS = {"two shards": MeshShape(shard=2), "two replicas of two": MeshShape(replicate=2, shard=2)}
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
        trainer.hold(level)  # type: ignore[arg-type]
    trainer.hold("weights")
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
    trainer.hold("all")
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
    found, job = ranks.run(life, kind, tmp_path), make_job(kind)
    first = found[0]
    for other in found[1:]:
        assert other["digests"] == first["digests"]
        assert all(torch.equal(other["weights"][name], weight) for name, weight in first["weights"].items())
    assert all(each["same"] and each["skipped"] == 1 for each in found)
    assert first["again"].loss == first["second"].loss
    assert len({name for each in found for name in each["files"]}) == ranks.shape.shard + 1
    single = single_trainer(job)
    assert np.abs(single.log_probs(job.batch) - first["log_probs"]).max() < 1e-3
    for step, name in enumerate(("first", "second")):
        expected, stats = single.update(job.batch, job.spec, step), first[name]
        assert stats.loss == pytest.approx(expected.loss, rel=1e-3, abs=1e-4)
        assert stats.grad_norm == pytest.approx(expected.grad_norm, rel=1e-3)
        assert stats.tokens == expected.tokens
    for name, weight in single.model.named_parameters():
        assert torch.allclose(weight, first["weights"][name], rtol=0.02, atol=2e-3), name
