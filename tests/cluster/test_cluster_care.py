"""Looking after a role's workers: pings and restarts by rank, some of them as a role, and who waits on whom."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from toy_workers import ToyExecutor, run_virtually, toys

from roll.cluster import Cluster, Dispatch, LocalExecutor, PendingCall, Worker, WorkerPlacement, dispatch
from roll.cluster.errors import CallTimedOut, WorkerDied
from roll.config.errors import RunError


class Waiter(Worker):
    @dispatch(Dispatch.ALL)
    async def wait(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return self.placement.name

    @dispatch(Dispatch.ALL)
    async def fail(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        raise OSError("broken")


async def waiters(count: int, deadline_s: float = 100) -> Cluster[Waiter]:
    places = [WorkerPlacement("waiter", rank, count) for rank in range(count)]
    return await Cluster.start(LocalExecutor(deadline_s), Waiter, places)


# ping and restart


def test_a_rank_is_pinged_and_restarted() -> None:
    async def main() -> None:
        executor = ToyExecutor()
        cluster, handles = toys(3, executor)
        await cluster.ping(1, 5)
        handles[1].become("dead")
        with pytest.raises(WorkerDied, match=r"^toy\[1\] died"):
            await cluster.ping(1, 5)
        handles[2].become("hung")
        with pytest.raises(CallTimedOut, match=r"^toy\[2\] has not answered ping for 5 s$"):
            await cluster.ping(2, 5)
        await cluster.ping(0, 5)
        await cluster.restart(1)
        await cluster.ping(1, 5)
        assert [cluster.restart_count(rank) for rank in range(3)] == [0, 1, 0]
        assert [name for _, name in executor.restarts] == ["toy[1]"]
        await cluster.end(0)
        assert [handle.state for handle in handles] == ["dead", "well", "hung"]

    run_virtually(main)


def test_local_workers_are_always_well_and_made_again_in_this_process() -> None:
    async def main() -> None:
        cluster = await waiters(2)
        await cluster.ping(1, 0.001)
        await cluster.end(1)
        assert await cluster.call_rank(1, Waiter.wait, 0) == "waiter[1]", "it ends with this process"
        assert cluster.restart_count(1) == 0
        before = [handle._worker for handle in cluster._handles]  # type: ignore[attr-defined]
        await cluster.restart(1)
        after = [handle._worker for handle in cluster._handles]  # type: ignore[attr-defined]
        assert (after[0] is before[0], after[1] is before[1]) == (True, False)
        assert (cluster.restart_count(1), await cluster.call_rank(1, Waiter.wait, 0)) == (1, "waiter[1]")

    run_virtually(main)


def test_a_cluster_that_travelled_calls_and_does_not_restart() -> None:
    async def main() -> None:
        cluster = await waiters(2, deadline_s=7)
        pending = asyncio.create_task(cluster.call_rank(0, Waiter.wait, 1))
        await asyncio.sleep(0)
        travelled: Cluster[Waiter] = pickle.loads(pickle.dumps(cluster))
        assert (travelled.role, travelled.placements, travelled.deadline_s) == ("waiter", cluster.placements, 7)
        assert await travelled.call_rank(1, Waiter.wait, 0) == "waiter[1]"
        assert travelled.pending() == []
        await pending
        with pytest.raises(RunError, match=r"^waiter\[0\] cannot be restarted here: only where its cluster was started$"):
            await travelled.restart(0)

    run_virtually(main)


# some of the workers


def test_a_subset_is_a_role_of_some_workers_that_keep_their_names() -> None:
    async def main() -> None:
        executor = ToyExecutor()
        cluster, handles = toys(4, executor)
        some = cluster.subset([3, 1])
        assert (some.role, len(some), some.deadline_s) == ("toy", 2, cluster.deadline_s)
        assert [place.name for place in some.placements] == ["toy[3]", "toy[1]"]
        handles[3].become("dead")
        with pytest.raises(WorkerDied, match=r"^toy\[3\] died"):
            await some.ping(0, 5)
        await some.restart(0)
        assert (some.restart_count(0), cluster.restart_count(3)) == (1, 1)
        assert [place.name for place in some.subset([1]).placements] == ["toy[1]"]
        with pytest.raises(ValueError, match="'toy' has no workers"):
            cluster.subset([])

    run_virtually(main)


def test_calls_on_a_subset_reach_its_workers_alone() -> None:
    async def main() -> None:
        some = (await waiters(3)).subset([2, 1])
        assert await some.call_each(Waiter.wait, 0) == ["waiter[2]", "waiter[1]"]
        assert await some.call(Waiter.wait, 0) == "waiter[2]"
        assert await some.call_rank(1, Waiter.wait, 0) == "waiter[1]"

    run_virtually(main)


# who waits on whom


def test_pending_calls_name_worker_method_and_how_long_the_oldest_first() -> None:
    async def main() -> None:
        cluster = await waiters(2)
        assert cluster.pending() == []
        first = asyncio.create_task(cluster.call_rank(1, Waiter.wait, 10))
        await asyncio.sleep(1)
        both = asyncio.create_task(cluster.call_each(Waiter.wait, 5))
        await asyncio.sleep(2)
        assert cluster.pending() == [
            PendingCall("waiter[1]", "wait", 3),
            PendingCall("waiter[0]", "wait", 2),
            PendingCall("waiter[1]", "wait", 2),
        ]
        await both
        assert cluster.pending() == [PendingCall("waiter[1]", "wait", 6)]
        await first
        assert cluster.pending() == []

    run_virtually(main)


@pytest.mark.parametrize("end", ["error", "deadline", "cancelled"])
def test_a_call_is_pending_no_more_however_it_ends(end: str) -> None:
    async def main() -> None:
        cluster = await waiters(2, deadline_s=3)
        method: Any = Waiter.fail if end == "error" else Waiter.wait
        call = asyncio.create_task(cluster.call(method, 1 if end == "error" else 50))
        await asyncio.sleep(0.5)
        assert len(cluster.pending()) == 2
        if end == "cancelled":
            call.cancel()
        await asyncio.wait({call})
        assert isinstance(None if call.cancelled() else call.exception(), OSError | CallTimedOut | None)
        await asyncio.sleep(2)
        assert cluster.pending() == []

    run_virtually(main)


def test_calls_on_a_subset_are_pending_at_the_whole_too() -> None:
    async def main() -> None:
        cluster = await waiters(3)
        some = cluster.subset([2])
        call = asyncio.create_task(some.call(Waiter.wait, 5))
        await asyncio.sleep(1)
        assert cluster.pending() == some.pending() == [PendingCall("waiter[2]", "wait", 1)]
        await call
        assert cluster.pending() == []

    run_virtually(main)
