"""Ranks in processes of their own that compute together over gloo: when one is killed or stopped in a collective, all are
ended, the caller hears which one was lost, and new ones meet again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from processes import eventually, gone, state

from roll.cluster import Cluster, Dispatch, LocalExecutor, RestartPolicy, Supervisor, Worker, WorkerPlacement, dispatch
from roll.cluster.errors import CallTimedOut, RemoteError, WorkerDied
from roll.cluster.mesh import MeshShape

SHAPE = MeshShape(shard=2)


class Reducer(Worker):
    """A rank of a gloo group."""

    @dispatch(Dispatch.ALL)
    def pid(self) -> int:
        return os.getpid()

    @dispatch(Dispatch.ONE)
    def open(self, deadline_s: float) -> Any:
        from roll.strategy.train.sharded.process_group import open_store

        self._store, rendezvous = open_store("127.0.0.1", deadline_s)
        return rendezvous

    @dispatch(Dispatch.ALL)
    def join(self, rendezvous: Any) -> None:
        import torch

        from roll.strategy.train.sharded.process_group import RankGroup

        torch.set_num_threads(1)
        own = self._store if self.placement.rank == 0 else None
        self._group = RankGroup(self.placement.rank, SHAPE, rendezvous, torch.device("cpu"), own)

    @dispatch(Dispatch.ONE)
    def total(self) -> float:
        import torch

        return float(self._group.sum(torch.tensor([self.placement.rank + 1.0])))

    @dispatch(Dispatch.ONE)
    def reduce_for_ever(self) -> None:
        while True:
            self.total()


async def met(cluster: Cluster[Reducer], deadline_s: float) -> list[int]:
    """The ranks have met; their processes."""
    await cluster.call_each(Reducer.join, await cluster.call_rank(0, Reducer.open, deadline_s))
    assert await cluster.call(Reducer.total) == 3.0
    return await cluster.call_each(Reducer.pid)


def with_group(use: Callable[[Cluster[Reducer]], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        executor = LocalExecutor(120)
        try:
            places = [WorkerPlacement("rank", rank, 2, threads=1, mesh=SHAPE) for rank in range(2)]
            await asyncio.wait_for(use(await Cluster.start(executor, Reducer, places)), 1200)
        finally:
            await executor.close()

    asyncio.run(main())


async def loss_of(cluster: Cluster[Reducer], pid: int, number: signal.Signals) -> RemoteError:
    """Ranks compute; one gets a signal: what the caller hears."""
    computing = asyncio.create_task(cluster.call(Reducer.reduce_for_ever))
    await asyncio.sleep(0.3)  # they are somewhere in their collectives; where does not matter
    os.kill(pid, number)
    with pytest.raises(RemoteError) as caught:
        await computing
    return caught.value


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_in_a_collective_is_named_and_new_ranks_meet(rank: int) -> None:
    async def use(cluster: Cluster[Reducer]) -> None:
        pids = await met(cluster, 60)
        error = await loss_of(cluster, pids[rank], signal.SIGKILL)
        assert isinstance(error, WorkerDied)
        assert str(error).startswith(f"rank[{rank}] died: its process was killed by SIGKILL")
        assert all(gone(pid) for pid in pids)
        await cluster.restart(0)
        assert not set(await met(cluster, 60)) & set(pids)

    with_group(use)


@pytest.mark.thorough
def test_a_rank_stopped_in_a_collective_is_named_by_its_supervisor() -> None:
    async def use(cluster: Cluster[Reducer]) -> None:
        pids = await met(cluster, 600)
        supervisor = Supervisor(RestartPolicy(ping_s=0.2, hang_s=4))
        lost: list[tuple[int, str]] = []

        async def restored(rank: int) -> None: ...

        supervisor.watch(cluster, lambda rank, why: lost.append((rank, why)), restored, restart=False)
        error = await loss_of(cluster, pids[1], signal.SIGSTOP)
        await supervisor.close()
        assert isinstance(error, CallTimedOut)
        assert str(error) == "rank[1] has not answered a ping for 4 s"
        assert lost == [(1, str(error))]
        assert all(gone(pid) for pid in pids)

    with_group(use)


def test_a_stopped_rank_is_named_when_its_peer_has_waited_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll.cluster.cluster._PING_S", 1.0)

    async def use(cluster: Cluster[Reducer]) -> None:
        pids = await met(cluster, 20)
        os.kill(pids[0], signal.SIGSTOP)
        assert eventually(lambda: state(pids[0]) == "T")
        with pytest.raises(CallTimedOut, match=r"^rank\[0\] has not answered ping for 1 s$"):
            await cluster.call(Reducer.total)
        assert all(gone(pid) for pid in pids)

    with_group(use)
