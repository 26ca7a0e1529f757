"""Workers that share GPUs on Ray: each sees its own, and no others. The GPUs are numbers that Ray gives out."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator

import pytest
import ray

from roll.cluster import Cluster, Dispatch, Worker, WorkerPlacement, dispatch
from roll.cluster.mesh import MeshShape
from roll.cluster.ray_executor import RayExecutor
from roll.config.schema import RayConfig

pytestmark = pytest.mark.ray


class Looker(Worker):
    @dispatch(Dispatch.ALL)
    def sees(self) -> tuple[str, tuple[int, ...], list[str]]:
        return self.placement.device, self.placement.gpus, os.environ["CUDA_VISIBLE_DEVICES"].split(",")


@pytest.fixture
def three_gpus(own_cluster: None) -> Iterator[None]:
    from ray import cloudpickle

    here = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(here)  # workers cannot import a test
    ray.init(num_cpus=2, num_gpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
    cloudpickle.unregister_pickle_by_value(here)


def on(role: str, *gpus: tuple[int, ...], mesh: MeshShape | None = None) -> list[WorkerPlacement]:
    places = enumerate(gpus)
    return [WorkerPlacement(role, rank, len(gpus), device=f"cuda:{own[0]}", gpus=own, mesh=mesh) for rank, own in places]


@pytest.mark.thorough
def test_an_engine_of_two_gpus_sees_those_of_the_two_ranks_beside_it(three_gpus: None) -> None:
    ranks, engine = on("actor_train", (0,), (1,), mesh=MeshShape(shard=2)), on("actor_infer", (0, 1))
    alone = on("critic", (2,))

    async def main() -> None:
        executor = RayExecutor(RayConfig(start_deadline_s=600, call_deadline_s=300))
        try:
            executor.reserve([*ranks, *engine, *alone], ranks)
            starts = (Cluster.start(executor, Looker, places) for places in (ranks, engine, alone))
            actor, infer, critic = await asyncio.gather(*starts)
            seen = [*await actor.call_each(Looker.sees), *await critic.call_each(Looker.sees)]
            assert [(device, gpus) for device, gpus, _ in seen] == [("cuda:0", (0,))] * 3
            (first,), (second,), (third,) = (names for *_, names in seen)
            assert sorted([first, second, third]) == ["0", "1", "2"]
            assert await infer.call_each(Looker.sees) == [("cuda:0", (0, 1), [first, second])]
            await actor.keep_spares(_nothing)
            await asyncio.gather(actor.restart(0), infer.restart(0))
            assert await actor.call_each(Looker.sees) == seen[:2]
            assert await infer.call_each(Looker.sees) == [("cuda:0", (0, 1), [first, second])]
        finally:
            await executor.close()

    asyncio.run(main())


def _nothing() -> None:
    pass
