"""Steps of the optimizer over ranks: each computes its own parts, and all of them together what one process does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from roll.algorithm import LossSpec
from roll.strategy.train.sharded.process_group import RankGroup
from roll.strategy.train.sharded.strategy import ShardedStrategy
from roll.strategy.train.single import SingleStrategy
from tests.ranks import Ranks
from tests.strategy.train.sharded.trainers import Groups, Job, make_batch, sharded_trainer, single_trainer, whole

SETTINGS = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad_norm": 0.01, "eps": 1e-2}
"""Gradients are clipped to far below their norm, and with an epsilon that outweighs them steps grow with what is left."""


def trained(trainer: SingleStrategy | ShardedStrategy, job: Job) -> tuple[list[float], dict[str, Tensor]]:
    """The norm at each of two steps, and the weights after them."""
    norms = [trainer.update(job.batch, job.spec, step).grad_norm for step in range(2)]
    return norms, {name: whole(p).detach().clone() for name, p in trainer.model.named_parameters()}


def on_ranks(group: RankGroup, job: Job) -> tuple[list[float], dict[str, Tensor]]:
    return trained(sharded_trainer(group, job), job)


@pytest.mark.parametrize("kind", ["tied", "qwen3_moe"])
def test_clipped_steps_are_those_of_one_process(ranks: Ranks, kind: str) -> None:
    job = Job(make_batch(Groups(seed=3), kind), LossSpec("nll"), kind, torch.float64, settings=SETTINGS)
    norms, weights = trained(single_trainer(job), job)
    assert min(norms) > 10 * SETTINGS["clip_grad_norm"]
    for found_norms, found in ranks.run(on_ranks, job):
        assert found_norms == pytest.approx(norms, rel=1e-10)
        assert all(torch.allclose(found[name], weight, rtol=0, atol=1e-9) for name, weight in weights.items())
