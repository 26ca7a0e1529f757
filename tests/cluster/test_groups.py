"""A role whose workers are the ranks of a mesh fails as one: what its callers hear, who is ended, what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from toy_workers import POLICY, ToyExecutor, ToyHandle, now_s, run_virtually

from roll.cluster import Cluster, Dispatch, Supervisor, Worker, WorkerPlacement, dispatch
from roll.cluster.errors import CallFailure, CallTimedOut, RemoteError, WorkerDied, WorkerError
from roll.cluster.mesh import MeshShape
from roll.config.errors import UserError

Answer = Callable[[], Awaitable[Any]]


class Role(Worker):
    @dispatch(Dispatch.ALL)
    def work(self) -> str:
        raise AssertionError("toys answer instead")


class RankHandle(ToyHandle):
    """Answers a call as a test says; when it is killed, whoever waits hears of it."""

    def __init__(self, place: WorkerPlacement) -> None:
        super().__init__(place)
        self.answer: Answer = self.at_once
        self.ended_s: float | None = None

    async def at_once(self) -> str:
        return self.placement.name

    async def never(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError("it waits for ever")

    async def call(self, method: str, args: Any, kwargs: Any) -> Any:
        death = self._changed
        answering, dying = asyncio.ensure_future(self.answer()), asyncio.ensure_future(death.wait())
        try:
            await asyncio.wait({answering, dying}, return_when=asyncio.FIRST_COMPLETED)
            if self.state == "dead":
                raise WorkerDied(self.placement.name, "its process was killed by SIGKILL")
            return await answering
        finally:
            answering.cancel()
            dying.cancel()
            await asyncio.gather(answering, dying, return_exceptions=True)

    async def end(self, deadline_s: float) -> None:
        self.ended_s = now_s() if self.ended_s is None else self.ended_s
        await super().end(deadline_s)

    def lost_its_peer(self, after_s: float) -> Answer:
        async def answer() -> str:
            await asyncio.sleep(after_s)
            said = RuntimeError("Connection closed by peer [127.0.0.1]:4711")
            raise WorkerError(CallFailure.of(said, self.placement.name, "work", "here"))

        return answer

    def dies(self, after_s: float) -> Answer:
        async def answer() -> str:
            await asyncio.sleep(after_s)
            self.become("dead")
            return "nobody hears it"

        return answer

    def raises(self, error: Exception, after_s: float = 0) -> Answer:
        async def answer() -> str:
            await asyncio.sleep(after_s)
            raise error

        return answer


def group(count: int = 3, deadline_s: float = 100) -> tuple[Cluster[Role], list[RankHandle], ToyExecutor]:
    executor = ToyExecutor()
    shape = MeshShape(shard=count)
    handles = [RankHandle(WorkerPlacement("rank", rank, count, mesh=shape)) for rank in range(count)]
    return Cluster("rank", handles, deadline_s, executor), handles, executor  # type: ignore[arg-type]


async def error_of(cluster: Cluster[Role]) -> Exception:
    with pytest.raises(Exception) as caught:
        await cluster.call(Role.work)
    return caught.value


def states(handles: list[RankHandle]) -> list[str]:
    return [handle.state for handle in handles]


# what a caller hears


@pytest.mark.parametrize("noticed_s", [0.0, 0.4, 0.9])
def test_the_dead_rank_is_named_though_its_peers_speak_first(noticed_s: float) -> None:
    async def main() -> None:
        cluster, handles, _ = group()
        handles[0].answer = handles[0].lost_its_peer(0.0)
        handles[1].answer = handles[1].dies(noticed_s)
        handles[2].answer = handles[2].never
        error = await error_of(cluster)
        assert isinstance(error, WorkerDied)
        assert error.worker == "rank[1]"
        assert states(handles) == ["dead"] * 3
        assert [handle.ended_s for handle in handles] == [noticed_s] * 3, "at once, without waiting for others"

    run_virtually(main)


def test_a_hung_rank_is_named_when_its_peers_give_up_first() -> None:
    async def main() -> None:
        cluster, handles, _ = group()
        for peer in handles[:2]:
            peer.answer = peer.lost_its_peer(30)
        handles[2].answer = handles[2].never
        handles[2].become("hung")
        error = await error_of(cluster)
        assert isinstance(error, CallTimedOut)
        assert error.worker == "rank[2]"
        assert states(handles) == ["dead"] * 3
        assert now_s() < 40

    run_virtually(main)


def test_a_hung_rank_is_named_when_all_calls_have_come_to_their_deadline() -> None:
    async def main() -> None:
        cluster, handles, _ = group(deadline_s=50)
        for handle in handles:
            handle.answer = handle.never
        handles[1].become("hung")
        error = await error_of(cluster)
        assert isinstance(error, CallTimedOut)
        assert error.worker == "rank[1]"
        assert states(handles) == ["dead"] * 3

    run_virtually(main)


def test_when_all_answer_pings_the_deadline_is_the_error_and_the_group_ends() -> None:
    async def main() -> None:
        cluster, handles, _ = group(deadline_s=50)
        handles[1].answer = handles[1].never
        error = await error_of(cluster)
        assert isinstance(error, CallTimedOut)
        assert str(error) == "rank[1] has not answered work for 50 s"
        assert states(handles) == ["dead"] * 3

    run_virtually(main)


def test_an_error_that_leaves_others_waiting_is_raised_and_ends_the_group() -> None:
    async def main() -> None:
        cluster, handles, _ = group()
        handles[0].answer = handles[0].raises(UserError("write this"))
        handles[1].answer = handles[2].answer = handles[1].never
        assert str(await error_of(cluster)) == "write this"
        assert states(handles) == ["dead"] * 3, "they wait in a collective that rank 0 never comes to"

    run_virtually(main)


@pytest.mark.parametrize("others", ["raise too", "return"])
def test_an_error_after_which_all_have_answered_leaves_the_group_well(others: str) -> None:
    async def main() -> None:
        cluster, handles, _ = group()
        for handle in handles if others == "raise too" else handles[:1]:
            handle.answer = handle.raises(UserError("write this"), after_s=0.1 * handle.placement.rank)
        assert str(await error_of(cluster)) == "write this"
        assert states(handles) == ["well"] * 3
        for handle in handles:
            handle.answer = handle.at_once
        assert await cluster.call(Role.work) == "rank[0]"

    run_virtually(main)


def test_a_call_on_one_rank_that_died_ends_the_group() -> None:
    async def main() -> None:
        cluster, handles, _ = group()
        handles[1].answer = handles[1].dies(0)
        with pytest.raises(WorkerDied, match=r"^rank\[1\] died"):
            await cluster.call_rank(1, Role.work)
        assert states(handles) == ["dead"] * 3
        assert str(await error_of(cluster)).startswith("rank[1] died"), "not of the ranks that were ended for it"

    run_virtually(main)


def test_a_call_on_one_rank_that_lost_its_peer_names_the_peer() -> None:
    async def main() -> None:
        cluster, handles, _ = group()
        handles[0].answer = handles[0].lost_its_peer(0)
        handles[1].become("dead")
        with pytest.raises(WorkerDied, match=r"^rank\[1\] died"):
            await cluster.call_rank(0, Role.work)
        assert states(handles) == ["dead"] * 3

    run_virtually(main)


def test_a_cluster_that_was_sent_leaves_the_group_to_its_owner_and_stays_with_its_processes() -> None:
    async def main() -> None:
        cluster, handles, _ = group()
        sent = cluster.snapshot()
        handles[0].answer = handles[0].lost_its_peer(0)
        sent_handles: list[Any] = sent._handles
        sent_handles[1].become("dead")
        sent_handles[0].answer = handles[0].answer
        with pytest.raises(WorkerDied, match=r"^rank\[1\] died"):
            await sent.call_rank(0, Role.work)
        assert states(handles) == ["well"] * 3
        handles[0].answer = handles[0].at_once
        await cluster.restart(0)
        assert (await cluster.call(Role.work), cluster.restart_count(1)) == ("rank[0]", 1)
        assert sent.restart_count(1) == 0
        with pytest.raises(WorkerDied, match=r"^rank\[1\] died"):
            await sent.call_rank(1, Role.work)

    run_virtually(main)


def test_workers_that_are_no_ranks_of_a_mesh_die_alone() -> None:
    async def main() -> None:
        handles = [RankHandle(WorkerPlacement("rank", rank, 3)) for rank in range(3)]
        cluster: Cluster[Role] = Cluster("rank", handles, 100)
        handles[1].answer = handles[1].dies(0)
        assert isinstance(await error_of(cluster), WorkerDied)
        assert states(handles) == ["well", "dead", "well"]

    run_virtually(main)


# restarts


def test_a_group_is_restarted_as_one() -> None:
    async def main() -> None:
        cluster, handles, executor = group()
        handles[1].answer = handles[1].dies(0)
        await error_of(cluster)
        handles[1].answer = handles[1].at_once
        began_s = now_s()
        await cluster.restart(2)
        assert sorted(executor.restarts) == [(began_s, f"rank[{rank}]") for rank in range(3)]
        assert now_s() == began_s + executor.restart_s, "at the same time"
        assert [cluster.restart_count(rank) for rank in range(3)] == [1, 1, 1]
        assert await cluster.call(Role.work) == "rank[0]"
        assert cluster.group_failure is None

    run_virtually(main)


# supervision


class Told:
    def __init__(self) -> None:
        self.lost: list[tuple[int, str]] = []
        self.restored: list[int] = []

    def on_lost(self, rank: int, why: str) -> None:
        self.lost.append((rank, why))

    async def on_restored(self, rank: int) -> None:
        self.restored.append(rank)


@pytest.mark.parametrize("how", ["dead", "hung"])
@pytest.mark.parametrize("restart", [True, False])
def test_the_supervisor_ends_a_group_with_its_lost_rank_and_tells_it_once(how: Any, restart: bool) -> None:
    async def main() -> None:
        cluster, handles, executor = group()
        supervisor, told = Supervisor(POLICY), Told()
        supervisor.watch(cluster, told.on_lost, told.on_restored, restart)
        for handle in handles:
            handle.answer = handle.never
        calling = asyncio.create_task(error_of(cluster))
        await asyncio.sleep(3)
        handles[1].become(how)
        await asyncio.sleep(POLICY.hang_s + 5)
        says = "rank[1] died: " if how == "dead" else "rank[1] has not answered a ping for 20 s"
        error = await calling
        assert isinstance(error, RemoteError)
        assert (error.worker, str(error).startswith(says)) == ("rank[1]", True), "the call hears it as well"
        assert [(rank, why.startswith(says)) for rank, why in told.lost] == [(1, True)]
        assert [(each.worker, each.state) for each in supervisor.status()] == [("rank", "well" if restart else "gone")]
        if restart:
            assert (told.restored, len(executor.restarts), states(handles)) == ([0], 3, ["well"] * 3)
        else:
            assert (told.restored, executor.restarts, states(handles)) == ([], [], ["dead"] * 3)
        await supervisor.close()

    run_virtually(main)


def test_a_group_that_fails_too_often_ends_the_run() -> None:
    async def main() -> None:
        cluster, handles, _ = group()
        supervisor, told = Supervisor(POLICY), Told()
        supervisor.watch(cluster, told.on_lost, told.on_restored)
        for number in range(POLICY.restarts + 1):
            handles[number % 3].become("dead")
            await asyncio.sleep(20)
        with pytest.raises(
            Exception, match=r"rank is not restarted again: rank has failed 6 times|it has failed 6 times"
        ):
            supervisor.failed.result()
        assert len(told.restored) == POLICY.restarts
        await supervisor.close()

    run_virtually(main)
