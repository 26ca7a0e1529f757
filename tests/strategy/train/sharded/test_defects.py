"""Defects of a sharded trainer are noticed by what the tests of its gradient check."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from roll.cluster.mesh import MeshShape
from tests.ranks import Ranks, ranks_of
from tests.strategy.train.sharded.mutants import DEFECTS
from tests.strategy.train.sharded.test_gradients import check, spec_of
from tests.strategy.train.sharded.trainers import Groups, Job, make_batch, sharded_update

NOTICED_BY = {
    "mean_over_ranks": "the gradient",  # in fp64: in fp32 gloo sums where a mean is asked for
    "default_divide_factor": "the gradient",
    "no_forced_sum": "PREMUL_SUM with Gloo",
    "weights_of_the_part": "the loss",
    "wrong_precision": "the loss",
}
DEADLINE_S = 5.0


def job() -> Job:
    return Job(make_batch(Groups(seed=3, groups=3, untrained=0.0)), spec_of("clipped", "token_mean"), extra_rows=0)


@pytest.fixture(scope="module")
def own_ranks() -> Iterator[Ranks]:
    """Not those of other tests: a defect may leave them in the middle of something."""
    with ranks_of(MeshShape(shard=2)) as ranks:
        yield ranks


def test_every_defect_is_tried() -> None:
    assert {*NOTICED_BY, "no_idle_passes", "one_leaves"} == set(DEFECTS)


@pytest.mark.thorough
@pytest.mark.parametrize("defect", NOTICED_BY)
def test_a_defect_is_noticed(own_ranks: Ranks, defect: str) -> None:
    check(own_ranks, job())
    with pytest.raises(AssertionError, match=NOTICED_BY[defect]):
        check(own_ranks, replace(job(), defect=defect))


def failures(ranks: Ranks, work: Job) -> list[str]:
    """How each rank failed that did."""
    ranks.send(sharded_update, work)
    said = []
    for rank in range(ranks.shape.ranks):
        try:
            ranks.answer(rank)
        except AssertionError as error:
            said.append(str(error))
        except EOFError:
            said.append(f"rank {rank} died")
    return said


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("defect", "noticed"),
    [("no_idle_passes", "died|Timed out|Connection"), ("one_leaves", "Timed out")],
)
def test_a_rank_that_makes_fewer_passes_is_noticed(defect: str, noticed: str) -> None:
    """The other one waits for it no longer than the deadline; gloo ends ranks that do different things at once."""
    work = Job(make_batch(Groups(groups=1, most_samples=1)), spec_of("nll", "token_mean"))
    with ranks_of(MeshShape(shard=2), deadline_s=DEADLINE_S) as ranks:
        assert failures(ranks, work) == []
        said = failures(ranks, replace(work, defect=defect))
    assert any(re.search(noticed, text) for text in said), said
