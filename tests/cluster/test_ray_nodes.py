"""Several nodes, all of them on this machine: workers lie where they were put, and their tokens go from node to node."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import ray
from local_ray import start_nodes

from roll.cluster import Cluster, Dispatch, Worker, WorkerPlacement, dispatch
from roll.cluster.ray_executor import RayExecutor
from roll.config.schema import RayConfig
from roll.data import Batch
from roll.data.batch import Indices
from roll.data.remote_columns import TokenColumn

pytestmark = pytest.mark.ray


def join(results: Sequence[TokenColumn], parts: Sequence[Indices], whole: Batch) -> TokenColumn:
    return TokenColumn.concat(results, parts)


class Settler(Worker):
    @dispatch(Dispatch.ALL)
    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    @dispatch(Dispatch.DATA, join=join)
    def halves(self, batch: Batch) -> TokenColumn:
        return TokenColumn.flat(batch.ids.astype(np.float32) / 2, batch.offsets)

    @dispatch(Dispatch.ALL)
    def total(self, batch: Batch) -> float:
        return float(batch["ref"].sum(dtype=np.float64))


@pytest.fixture
def two_nodes(own_cluster: None) -> Iterator[str]:
    """The address of a cluster of two nodes of one core each."""
    from ray import cloudpickle

    here = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(here)  # workers cannot import a test
    nodes = start_nodes(2, num_cpus=1, object_store_memory=10**8)
    yield nodes.address
    nodes.shutdown()
    cloudpickle.unregister_pickle_by_value(here)


@pytest.mark.thorough
def test_workers_lie_on_their_nodes_and_read_what_is_on_the_other(
    two_nodes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # which is sent to the nodes
    lengths = [400_000, 300_000, 5]  # too many tokens to travel inside a message
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    batch = Batch(offsets, {"ids": np.arange(offsets[-1], dtype=np.int32)})

    async def main() -> None:
        executor = RayExecutor(RayConfig(address=two_nodes, start_deadline_s=600, call_deadline_s=300))
        try:
            nodes = [node.id for node in executor.nodes()]
            assert len(set(nodes)) == 2
            places = [
                WorkerPlacement("settler", rank, 2, threads=1, node=node) for rank, node in enumerate(reversed(nodes))
            ]
            executor.reserve(places)
            settlers = await Cluster.start(executor, Settler, places)
            assert await settlers.call_each(Settler.node) == nodes[::-1]
            halved = batch.with_columns(ref=await settlers.call(Settler.halves, batch))
            assert await settlers.call_each(Settler.total, halved) == [batch.ids.sum(dtype=np.int64) / 2] * 2
            fetched = await executor.fetch(halved)
            assert (fetched["ref"] == batch.ids / 2).all()
        finally:
            await executor.close()

    asyncio.run(main())
    assert not ray.is_initialized()
