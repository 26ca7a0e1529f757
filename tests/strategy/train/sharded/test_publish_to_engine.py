"""A version goes from the shards of a trainer's ranks to an engine by every path, and a damaged shard is named."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path as FilePath

import pytest
import torch
from torch.distributed.tensor import DTensor

from roll.cluster import Cluster, Dispatch, LocalExecutor, WorkerPlacement, dispatch
from roll.cluster.mesh import MeshShape
from roll.config import RunError, load_config
from roll.config.schema import Config
from roll.strategy.train.policy import PolicyTrainer
from roll.weight_sync.rendezvous import Path, WeightAnnouncement
from roll.workers.infer import InferWorker
from roll.workers.publish import publish
from roll.workers.rank_group import join_ranks
from roll.workers.train import TrainWorker

TINY = FilePath(__file__).parents[4] / "examples" / "tiny.yaml"
DAMAGED = "model.layers.1.mlp.up_proj.weight"
TWICE, ONCE = range(2, 4), range(4, 6)
"""Versions that are damaged whenever they are sent, and the first time."""


class Damaged(TrainWorker):
    """Whose second rank changes an element of its shard after the digests were computed."""

    _offered = -1

    @dispatch(Dispatch.ONE)
    def announce(self, version: int, path: Path) -> WeightAnnouncement:
        again, self._offered = self._offered == version, version
        made = super().announce(version, path)
        assert isinstance(self.strategy, PolicyTrainer)
        weight = self.strategy.model.get_parameter(DAMAGED)
        assert isinstance(weight, DTensor)
        if self.placement.rank == 1 and (version in TWICE or (version in ONCE and not again)):
            with torch.no_grad():
                weight.to_local()[-1, -1] += 1
        return made


@pytest.mark.thorough
def test_every_path_brings_the_weights_of_ranks_to_an_engine_and_names_a_damaged_shard() -> None:
    config = load_config(str(TINY), ["threads=1", "model.dtype=fp32", "weight_sync.bucket_mb=1"])
    asyncio.run(asyncio.wait_for(published(config), 1200))


async def published(config: Config) -> None:
    workers = LocalExecutor(120)
    try:
        ranks = [WorkerPlacement("actor_train", rank, 2, threads=1, mesh=MeshShape(shard=2)) for rank in range(2)]
        actor = await join_ranks(await Cluster.start(workers, partial(Damaged, config=config), ranks))
        engines = await Cluster.start(
            workers, partial(InferWorker, config=config, own_weights=True), [WorkerPlacement("actor_infer", threads=1)]
        )
        paths: tuple[Path, ...] = ("shared_memory", "broadcast")
        for number, path in enumerate(paths):
            await publish(actor, engines, number, path)
            with pytest.raises(
                RunError, match=rf"damaged 2 times by the path {path}: the tensor '{DAMAGED}' at actor_infer"
            ):
                await publish(actor, engines, TWICE[number], path)
            await publish(actor, engines, ONCE[number], path)  # it is sent again
    finally:
        await workers.close()
