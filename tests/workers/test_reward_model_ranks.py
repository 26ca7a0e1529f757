"""A reward model over ranks, one of which fails in what the others wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from classifiers import save_liking

from roll import load_config
from roll.cluster import Cluster, LocalExecutor, WorkerPlacement
from roll.cluster.errors import WorkerDied, WorkerError
from roll.cluster.mesh import MeshShape
from roll.data import Message
from roll.data.tokenlog import IntArray
from roll.strategy.train.sharded.process_group import RankGroup
from roll.workers.rank_group import join_ranks
from roll.workers.reward_model import RewardModelWorker

SAID = [Message(role="user", content="Say it."), Message(role="assistant", content="7")]
DEADLINE_S = 120.0


class OneFails(RewardModelWorker):
    """A reward model of which one rank fails before it computes anything."""

    failing = 0

    def build(self, group: RankGroup | None) -> None:
        super().build(group)
        if self.placement.rank == self.failing:
            patch.object(self.strategy, "scores", self._fail).start()

    @staticmethod
    def _fail(conversations: Sequence[IntArray]) -> Any:
        raise RuntimeError("CUDA error: out of memory")


class FollowerFails(OneFails):
    failing = 1


async def asked(folder: Path, worker: type[OneFails]) -> list[BaseException | None]:
    """How a first and a second question end."""
    settings = load_config(
        {"model": "tiny", "threads": 1, "reward": "reward_model", "roles": {"reward_model": {"model": str(folder)}}}
    )
    executor = LocalExecutor(DEADLINE_S)
    places = [WorkerPlacement("reward_model", rank, 2, threads=1, mesh=MeshShape(shard=2)) for rank in range(2)]
    try:
        cluster = await join_ranks(await Cluster.start(executor, lambda place: worker(place, settings), places))
        await cluster.call(RewardModelWorker.set_residency, "all")
        return [await failure(cluster) for _ in range(2)]
    finally:
        await executor.close()


async def failure(cluster: Cluster[OneFails]) -> BaseException | None:
    try:
        await cluster.call_rank(0, RewardModelWorker.score, SAID)
    except Exception as error:
        return error
    return None


@pytest.mark.thorough
@pytest.mark.parametrize("worker", [OneFails, FollowerFails])
def test_a_rank_that_fails_alone_takes_its_group_with_it(worker: type[OneFails], tmp_path: Path) -> None:
    first, second = asyncio.run(asyncio.wait_for(asked(save_liking(tmp_path, "7"), worker), DEADLINE_S / 2))
    assert isinstance(first, WorkerError if worker is OneFails else WorkerDied | WorkerError)
    assert isinstance(second, WorkerDied)
