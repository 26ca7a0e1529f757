"""Workers that die or hang are reported once, brought back with patience, and given up in the end."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from toy_workers import POLICY, SOON_S, Watched, now_s, run_virtually

from roll.cluster import LocalExecutor, RestartPolicy, Supervisor, Worker, WorkerPlacement
from roll.cluster.cluster import Cluster
from roll.cluster.errors import CallTimedOut, ClusterLost, NodeLost, WorkerDied
from roll.config.errors import RunError, UserError


def watching(use: Callable[..., Coroutine[Any, Any, None]], **options: Any) -> None:
    async def main() -> None:
        watched = Watched(**options)
        try:
            await use(watched)
        finally:
            await watched.supervisor.close()

    run_virtually(main)


# health


def test_workers_that_are_well_are_pinged_in_turn_and_left_alone() -> None:
    async def use(watched: Watched) -> None:
        await asyncio.sleep(100)
        for rank, handle in enumerate(watched.handles):
            assert handle.pings[0] == pytest.approx(rank / 3, abs=1e-5)
            assert {round(b - a, 3) for a, b in zip(handle.pings, handle.pings[1:], strict=False)} == {1.01}
        assert (watched.lost, watched.restored, watched.executor.restarts) == ([], [], [])
        assert watched.states == ["well"] * 3
        assert not watched.supervisor.failed.done()

    watching(use)


def test_a_death_is_reported_at_once_and_the_worker_restarted_and_the_next_one_too() -> None:
    async def use(watched: Watched) -> None:
        await asyncio.sleep(10)
        for restart_count in range(3):
            began_s = now_s()
            watched.handles[1].become("dead")
            await asyncio.sleep(SOON_S)
            ((lost_s, rank, why),) = watched.lost
            assert lost_s <= began_s + SOON_S
            assert (rank, why) == (1, f"toy[1] died: killed, as number {restart_count}")
            await asyncio.sleep(20)
            ((restart_s, name),), ((restored_s, back),) = watched.executor.restarts, watched.restored
            assert (name, back) == ("toy[1]", 1)
            assert restart_s == pytest.approx(lost_s + 0.5 * 2**restart_count)
            assert restored_s == pytest.approx(restart_s + watched.executor.restart_s)
            assert watched.cluster.restart_count(1) == restart_count + 1
            assert watched.states == ["well"] * 3
            for noted in (watched.lost, watched.executor.restarts, watched.restored):
                noted.clear()

    watching(use)


def test_silence_is_a_hang_after_hang_s_and_not_before() -> None:
    async def use(watched: Watched) -> None:
        handle = watched.handles[0]
        handle.become("hung")
        await asyncio.sleep(19)
        handle.become("well")
        await asyncio.sleep(30)
        assert watched.lost == []
        handle.become("hung")
        pinged = len(handle.pings)
        await asyncio.sleep(30)
        ((lost_s, rank, why),) = watched.lost
        assert lost_s == pytest.approx(handle.pings[pinged] + 20)
        assert (rank, why) == (0, "toy[0] has not answered a ping for 20 s")
        assert watched.states == ["well"] * 3
        assert len(watched.restored) == 1

    watching(use)


def test_a_worker_that_dies_while_it_hangs_is_lost_then() -> None:
    async def use(watched: Watched) -> None:
        watched.handles[0].become("hung")
        await asyncio.sleep(5)
        watched.handles[0].become("dead")
        await asyncio.sleep(0.1)
        assert [(at, why) for at, _, why in watched.lost] == [(5, "toy[0] died: killed, as number 0")]

    watching(use)


def test_a_ping_that_this_process_missed_is_asked_again() -> None:
    async def use(watched: Watched) -> None:
        watched.handles[0].deaf = 1
        await asyncio.sleep(50)
        assert watched.lost == []
        watched.handles[0].deaf = 2
        await asyncio.sleep(50)
        assert len(watched.lost) == 1

    watching(use)


def test_a_suspected_worker_is_pinged_at_once() -> None:
    async def use(watched: Watched) -> None:
        await asyncio.sleep(10.5)
        before = [len(handle.pings) for handle in watched.handles]
        watched.supervisor.probe_now("toy", 1)
        watched.supervisor.probe_now("toy", 7)
        watched.supervisor.probe_now("other", 0)
        await asyncio.sleep(0.02)
        assert [len(handle.pings) - n for handle, n in zip(watched.handles, before, strict=True)] == [0, 1, 0]
        assert watched.handles[1].pings[-1] == 10.5
        watched.handles[2].become("dead")
        watched.supervisor.probe_now("toy", 2)
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        assert [(at, rank) for at, rank, _ in watched.lost] == [(10.52, 2)]

    watching(use)


def test_a_condemned_worker_is_restarted_though_it_answers() -> None:
    async def use(watched: Watched) -> None:
        await asyncio.sleep(10.5)
        watched.supervisor.mark_unhealthy("toy", 1, "it answers nonsense\nand more")
        watched.supervisor.mark_unhealthy("toy", 7, "nobody")
        watched.supervisor.mark_unhealthy("other", 0, "nobody")
        await asyncio.sleep(0.1)
        assert watched.lost == [(10.51, 1, "toy[1] died: it answers nonsense")]
        watched.supervisor.mark_unhealthy("toy", 1, "it is lost already")
        await asyncio.sleep(30)
        assert watched.cluster.restart_count(1) == len(watched.restored) == len(watched.lost) == 1
        assert watched.states == ["well"] * 3
        watched.supervisor.mark_unhealthy("toy", 0, "")
        await asyncio.sleep(10)
        assert watched.lost[1][1:] == (0, "toy[0] died: it does not work")
        assert [rank for _, rank in watched.restored] == [1, 0]

    watching(use)


def test_a_worker_condemned_while_it_is_restored_is_restarted_again() -> None:
    async def use(watched: Watched) -> None:
        async def restore(rank: int) -> None:
            if len(watched.restored) == 1:
                watched.supervisor.mark_unhealthy("toy", rank, "its weights are wrong")
                await asyncio.sleep(50)

        watched.restore = restore
        await watched.kill(0, until_well_s=20)
        assert (watched.cluster.restart_count(0), len(watched.lost)) == (2, 1)
        assert watched.states == ["well"] * 3

    watching(use)


def test_workers_that_die_together_come_back_together() -> None:
    async def use(watched: Watched) -> None:
        await asyncio.sleep(5)
        for handle in watched.handles:
            handle.become("dead")
        await asyncio.sleep(SOON_S + 0.5 + watched.executor.restart_s + 0.1)
        assert sorted(rank for _, rank in watched.restored) == [0, 1, 2, 3]
        assert sorted(rank for _, rank, _ in watched.lost) == [0, 1, 2, 3]

    watching(use, count=4)


def test_local_workers_are_well() -> None:
    async def main() -> None:
        cluster = await Cluster.start(LocalExecutor(), Worker, [WorkerPlacement("toy")])
        supervisor = Supervisor(POLICY)
        lost: list[int] = []

        async def restored(rank: int) -> None: ...

        supervisor.watch(cluster, lambda rank, why: lost.append(rank), restored)
        await asyncio.sleep(100)
        assert lost == []
        await supervisor.close()

    run_virtually(main)


# patience


def test_the_wait_doubles_with_each_failure_of_a_worker_up_to_the_most() -> None:
    async def use(watched: Watched) -> None:
        for _ in range(5):
            await watched.kill(0)
        waits = [began - lost for (began, _), (lost, _, _) in zip(watched.executor.restarts, watched.lost, strict=True)]
        assert waits == pytest.approx([0.5, 1, 2, 3, 3])

    watching(use)


def test_each_worker_has_a_patience_of_its_own_and_the_window_forgets() -> None:
    async def use(watched: Watched) -> None:
        await watched.kill(0)
        await watched.kill(0)
        await watched.kill(1)
        await asyncio.sleep(POLICY.window_s)
        await watched.kill(0)
        waits = [began - lost for (began, _), (lost, _, _) in zip(watched.executor.restarts, watched.lost, strict=True)]
        assert waits == pytest.approx([0.5, 1, 0.5, 0.5])

    watching(use)


def test_many_failures_make_the_wait_no_longer_than_the_most() -> None:
    async def use(watched: Watched) -> None:
        for _ in range(30):
            await watched.kill(0)
        assert len(watched.restored) == 30
        waits = {
            round(began - lost[0], 6) for (began, _), lost in zip(watched.executor.restarts, watched.lost, strict=True)
        }
        assert waits == {0.5, 1, 2, 3}
        assert len(watched.supervisor._tasks) == 2 * 3, "what has ended is forgotten"

    watching(use, policy=RestartPolicy(ping_s=1, restarts=1000, window_s=1e9, backoff_most_s=3))


@pytest.mark.parametrize("spread", [False, True])
def test_one_failure_too_many_of_a_role_ends_it(spread: bool) -> None:
    async def use(watched: Watched) -> None:
        ranks = [0, 1, 2, 0, 1, 2] if spread else [1] * 6
        for rank in ranks[:5]:
            await watched.kill(rank)
        assert not watched.supervisor.failed.done()
        assert len(watched.restored) == 5
        await watched.kill(ranks[5])
        error = await watched.error()
        assert type(error) is RunError
        assert str(error) == (
            f"toy[{ranks[5]}] failed, and toy is not restarted again: it has failed 6 times within 300 s, and 5 "
            f"restarts are allowed. The first cause: toy[{ranks[0]}] died: killed, as number 0"
        )
        assert len(watched.lost) == 6, "the last one too"
        assert len(watched.executor.restarts) == 5

    watching(use)


@pytest.mark.parametrize("alone", [False, True])
def test_a_role_of_many_workers_may_lose_each_of_them_once_but_none_too_often(alone: bool) -> None:
    async def use(watched: Watched) -> None:
        for rank in range(8) if not alone else [1, 1]:
            await watched.kill(rank)
        assert not watched.supervisor.failed.done()
        await watched.kill(1)
        who, times, mended = ("toy[1]", 3, 2) if alone else ("it", 9, 8)
        assert f"{who} has failed {times} times within 300 s, and {mended} restarts are allowed" in str(
            await watched.error()
        )

    watching(use, count=8, policy=RestartPolicy(ping_s=1, restarts=2, window_s=300))


def test_failures_within_the_window_count_and_older_ones_do_not() -> None:
    async def use(watched: Watched) -> None:
        for _ in range(10):
            await watched.kill(0, until_well_s=POLICY.window_s / 5 + 1)
        assert not watched.supervisor.failed.done()
        await watched.kill(1)
        assert not watched.supervisor.failed.done()
        await watched.kill(1)
        assert "toy[1] failed" in str(await watched.error())

    watching(use)


def test_watching_again_forgets_no_failures() -> None:
    async def use(watched: Watched) -> None:
        for _ in range(5):
            await watched.kill(0)
            watched.watch()
        assert len(watched.restored) == 5
        await watched.kill(0)
        assert "has failed 6 times" in str(await watched.error())

    watching(use)


def test_no_restarts_means_the_first_failure_ends_it() -> None:
    async def use(watched: Watched) -> None:
        await watched.kill(0)
        assert "it has failed 1 times within 300 s, and 0 restarts are allowed" in str(await watched.error())
        assert watched.executor.restarts == []

    watching(use, policy=RestartPolicy(restarts=0, window_s=300))


def test_roles_have_budgets_of_their_own_and_fall_together() -> None:
    async def main() -> None:
        one = Watched()
        other = Watched(role="other", supervisor=one.supervisor)
        for _ in range(4):
            await one.kill(0)
            await other.kill(0)
        assert len(one.restored) == len(other.restored) == 4
        for _ in range(2):
            await one.kill(0)
        assert str(await one.error()).startswith("toy[0] failed, and toy is not")
        other.handles[1].become("dead")
        await asyncio.sleep(100)
        assert len(other.lost) == 4, "nothing is reported any more"
        one.watch()
        await one.kill(1)
        assert len(one.lost) == 6
        await one.supervisor.close()
        assert isinstance(one.supervisor.failed.exception(), RunError)

    run_virtually(main)


# what fails on the way back


def test_a_restart_that_fails_counts_and_is_tried_again() -> None:
    async def use(watched: Watched) -> None:
        errors: list[Exception] = [WorkerDied("toy[0]", "no memory"), RunError("toy[0] has not started within 3 s")]
        watched.executor.errors["toy[0]"] = list(errors)
        await watched.kill(0, until_well_s=0.1)
        assert [why for *_, why in watched.lost] == ["toy[0] died: killed, as number 0"]
        await asyncio.sleep(20)
        ((began, _),) = [(at, rank) for at, rank, _ in watched.lost]
        times = [at - began for at, _ in watched.executor.restarts]
        assert times == pytest.approx([0.5, 0.5 + 2 + 1, 0.5 + 2 + 1 + 2 + 2])
        assert len(watched.lost) == len(watched.restored) == 1
        assert watched.states == ["well"] * 3
        assert watched.supervisor.status()[0].why == "toy[0] has not started within 3 s"
        for _ in range(3):
            await watched.kill(0, until_well_s=15)
        assert "has failed 6 times" in str(await watched.error()), "those two were counted"

    watching(use)


def test_a_restoration_that_fails_counts_and_the_worker_is_restarted_again() -> None:
    async def use(watched: Watched) -> None:
        tries = []

        async def restore(rank: int) -> None:
            tries.append(rank)
            await asyncio.sleep(1)
            if len(tries) <= 2:
                raise WorkerDied("actor_train[0]", "gone")

        watched.restore = restore
        await watched.kill(2, until_well_s=30)
        assert tries == [2, 2, 2]
        assert watched.cluster.restart_count(2) == 3
        assert [rank for _, rank, _ in watched.lost] == [2]
        assert watched.states == ["well"] * 3
        watched.restore = fails_always
        await watched.kill(1, until_well_s=100)
        assert str(await watched.error()).endswith("The first cause: toy[2] died: killed, as number 0")
        assert [rank for _, rank, _ in watched.lost] == [2, 1]

    watching(use)


async def fails_always(rank: int) -> None:
    raise CallTimedOut("actor_train[0]", "offer", 5)


@pytest.mark.parametrize("state", ["dead", "hung"])
def test_a_worker_lost_while_it_is_restored_is_restarted_again(state: Any) -> None:
    async def use(watched: Watched) -> None:
        ended: list[str] = []

        async def restore(rank: int) -> None:
            if ended:
                return
            try:
                await asyncio.sleep(1)
                watched.handles[rank].become(state)
                await asyncio.sleep(60)
                ended.append("returned")
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise

        watched.restore = restore
        await watched.kill(0, until_well_s=50)
        assert ended == ["cancelled"]
        assert watched.cluster.restart_count(0) == 2
        assert len(watched.lost) == 1
        assert watched.states == ["well"] * 3
        (_, first), (_, second) = [(name, at) for at, name in watched.executor.restarts]
        noticed_s = 20 if state == "hung" else 0
        assert second - first == pytest.approx(2 + 1 + noticed_s + 1, abs=1.1)

    watching(use)


def test_a_restoration_that_never_ends_has_a_deadline_also_if_it_holds_on() -> None:
    async def use(watched: Watched) -> None:
        async def restore(rank: int) -> None:
            if len(watched.restored) == 1:
                await stubborn(60)

        watched.restore = restore
        await watched.kill(0, until_well_s=watched.executor.deadline_s + 15)
        assert watched.cluster.restart_count(0) == 2
        assert watched.states == ["well"] * 3
        assert watched.supervisor.status()[0].why == "toy[0] has not answered its restoration for 100 s"
        await asyncio.sleep(60)

    watching(use)


async def stubborn(seconds: float) -> None:
    """Waits for ever; when cancelled, for some seconds more."""
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(seconds)


def test_what_a_given_up_restoration_says_is_not_heard() -> None:
    async def use(watched: Watched) -> None:
        heard: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: heard.append(context))

        async def restore(rank: int) -> None:
            if len(watched.restored) > 1:
                return
            watched.handles[rank].become("dead")
            try:
                await asyncio.sleep(60)
            finally:
                raise OSError("and now this")

        watched.restore = restore
        await watched.kill(0, until_well_s=20)
        assert watched.states == ["well"] * 3
        gc.collect()
        assert heard == []

    watching(use)


def test_a_restoration_that_somebody_cancels_is_a_failure() -> None:
    async def use(watched: Watched) -> None:
        async def restore(rank: int) -> None:
            if len(watched.restored) == 1:
                raise asyncio.CancelledError

        watched.restore = restore
        await watched.kill(0, until_well_s=20)
        assert watched.cluster.restart_count(0) == 2
        assert watched.states == ["well"] * 3
        assert watched.supervisor.status()[0].why == "toy[0] could not be restored: that was cancelled"

    watching(use)


@pytest.mark.parametrize("error", [KeyError("a bug"), UserError("no such model: write another")])
@pytest.mark.parametrize("place", ["lost", "restart", "restored"])
def test_an_error_that_no_restart_mends_ends_it_as_itself(error: Exception, place: str) -> None:
    async def use(watched: Watched) -> None:
        async def fail(rank: int) -> None:
            raise error

        def fail_at_once(rank: int, why: str) -> None:
            raise error

        if place == "lost":
            watched.supervisor.watch(watched.cluster, fail_at_once, watched._restored)
        watched.restore = fail
        watched.executor.errors["toy[0]"] = [error] if place == "restart" else []
        await watched.kill(0)
        assert await watched.error() is error
        assert len(watched.executor.restarts) == (0 if place == "lost" else 1)

    watching(use)


# without restart


def test_without_restart_a_loss_is_reported_once_and_nothing_else_done(caplog: pytest.LogCaptureFixture) -> None:
    async def use(watched: Watched) -> None:
        for _ in range(2):
            await watched.kill(1, until_well_s=30)
            watched.supervisor.probe_now("toy", 1)
        await asyncio.sleep(5)
        assert [rank for _, rank, _ in watched.lost] == [1]
        assert watched.states == ["well", "gone", "well"]
        assert watched.executor.restarts == []
        pinged = [len(handle.pings) for handle in watched.handles]
        await asyncio.sleep(10)
        assert [len(h.pings) > n for h, n in zip(watched.handles, pinged, strict=True)] == [True, False, True]
        await watched.kill(0, 1)
        await watched.kill(2, 1)
        assert not watched.supervisor.failed.done(), "what to do is the caller's"

        for rank in range(3):
            await watched.cluster.restart(rank)
        watched.watch()
        await asyncio.sleep(3)
        assert watched.states == ["well"] * 3
        await watched.kill(2, 1)
        assert [rank for _, rank, _ in watched.lost] == [1, 0, 2, 2]

    watching(use, restart=False, policy=RestartPolicy(restarts=0))
    assert not caplog.records, "what to say is the caller's too"


def test_an_unwatched_role_is_left_alone_also_in_the_middle_of_a_restart() -> None:
    async def use(watched: Watched) -> None:
        other = Watched(role="other", supervisor=watched.supervisor)
        await watched.kill(0, until_well_s=1)
        assert watched.states[:3] == ["restarting", "well", "well"]
        watched.supervisor.unwatch("toy")
        watched.supervisor.unwatch("nobody")
        await watched.kill(1, until_well_s=50)
        assert watched.restored == []
        assert [rank for _, rank, _ in watched.lost] == [0]
        assert [each.worker for each in watched.supervisor.status()] == [f"other[{rank}]" for rank in range(3)]
        await other.kill(1)
        assert [rank for _, rank in other.restored] == [1]

    watching(use)


def test_watching_again_from_a_callback() -> None:
    async def use(watched: Watched) -> None:
        async def restore(rank: int) -> None:
            watched.watch()
            await asyncio.sleep(1)
            raise AssertionError("the old watch is over")

        watched.restore = restore
        await watched.kill(0, until_well_s=20)
        assert watched.states == ["well"] * 3
        assert len(asyncio.all_tasks()) == 2 + 2 * 3, "this one, its starter and two a worker"

    watching(use)


# status


def test_status_says_what_is_being_done_and_since_when() -> None:
    async def use(watched: Watched) -> None:
        async def restore(rank: int) -> None:
            await asyncio.sleep(4)

        def first() -> tuple[str, float, float, int, str]:
            one = watched.supervisor.status()[0]
            assert one.worker == "toy[0]"
            return one.state, round(one.since_s, 3), round(one.silent_s, 3), one.restart_count, one.why

        watched.restore = restore
        await asyncio.sleep(3.5)
        assert first() == ("well", 3.5, 0.46, 0, "")
        watched.handles[0].become("dead")
        watched.supervisor.probe_now("toy", 0)
        why = "toy[0] died: killed, as number 0"
        await asyncio.sleep(0.2)
        assert first() == ("lost", 0.2, 0.66, 0, why)
        await asyncio.sleep(1)
        assert first() == ("restarting", 0.7, 1.66, 0, why)
        await asyncio.sleep(2)
        assert first() == ("restoring", 0.7, 0.69, 1, why)
        await asyncio.sleep(4)
        assert first() == ("well", 0.7, 0.65, 1, why)
        assert [each.state for each in watched.supervisor.status()] == ["well"] * 3

    watching(use)


# close


@pytest.mark.parametrize("tenths", range(0, 80, 3))
def test_close_at_any_moment_ends_everything_at_once(tenths: int) -> None:
    async def use(watched: Watched) -> None:
        async def restore(rank: int) -> None:
            await asyncio.sleep(1)

        watched.restore = restore
        watched.supervisor.spawn(asyncio.sleep(1e6), endless=True)
        watched.executor.errors["toy[2]"] = [WorkerDied("toy[2]", "no memory")]
        watched.handles[0].become("dead")
        watched.handles[1].become("hung")
        watched.handles[2].become("dead")
        await asyncio.sleep(tenths / 10)
        closed_s = now_s()
        await watched.supervisor.close()
        assert now_s() == closed_s
        seen = [len(each) for each in (watched.lost, watched.restored, watched.executor.restarts)]
        pinged = [len(handle.pings) for handle in watched.handles]
        assert len(asyncio.all_tasks()) == 2
        await watched.supervisor.close()
        await asyncio.sleep(100)
        assert [len(each) for each in (watched.lost, watched.restored, watched.executor.restarts)] == seen
        assert [len(handle.pings) for handle in watched.handles] == pinged
        assert watched.supervisor.failed.result() is None
        assert watched.supervisor.status() == []

    watching(use)


def test_close_waits_for_what_holds_on_but_not_for_ever() -> None:
    async def use(watched: Watched) -> None:
        watched.restore = lambda rank: stubborn(1 if rank == 0 else 60)
        await watched.kill(0, until_well_s=5)
        await watched.supervisor.close()
        assert now_s() == pytest.approx(6)
        other = Watched()
        other.restore = watched.restore
        await other.kill(1, until_well_s=5)
        await asyncio.gather(other.supervisor.close(), other.supervisor.close())
        assert now_s() == pytest.approx(6 + 5 + 5)
        await other.supervisor.close()
        assert now_s() == pytest.approx(6 + 5 + 5 + 5), "it still holds on"
        await asyncio.sleep(60)

    watching(use)


@pytest.mark.parametrize("place", ["lost", "restored"])
def test_close_inside_a_callback(place: str) -> None:
    async def use(watched: Watched) -> None:
        closing: list[Any] = []

        def lost(rank: int, why: str) -> None:
            if place == "lost":
                closing.append(asyncio.ensure_future(watched.supervisor.close()))

        async def restored(rank: int) -> None:
            await watched.supervisor.close()
            closing.append("returned")
            await asyncio.sleep(1)
            closing.append("went on")

        watched.supervisor.watch(watched.cluster, lost, restored)
        await watched.kill(0, until_well_s=5)
        assert len(closing) == 1
        assert closing[0] == "returned" or closing[0].done()
        assert len(asyncio.all_tasks()) == 2
        await watched.supervisor.close()
        watched.watch()
        assert watched.supervisor.status() == []

    watching(use)


def test_close_after_a_failure_keeps_the_failure(caplog: pytest.LogCaptureFixture) -> None:
    async def use(watched: Watched) -> None:
        await watched.kill(0)
        error = await watched.error()
        await watched.supervisor.close()
        assert watched.supervisor.failed.exception() is error
        assert str(error) not in [record.getMessage() for record in caplog.records], "who hears it says it"

    watching(use, policy=RestartPolicy(restarts=0))


def test_a_failure_nobody_can_hear_any_more_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def use(watched: Watched) -> None:
        watched.supervisor.failed.cancel()
        task = watched.supervisor._watches["toy", 0].task
        await watched.kill(0)
        assert watched.supervisor.failed.cancelled()
        assert task.cancelled(), "and not broken"

    watching(use, policy=RestartPolicy(restarts=0))
    assert "toy[0] failed, and toy is not restarted again" in caplog.text


# lost nodes

LOST = "node1 (host, 10.0.0.2), which Ray has lost (no heartbeats)"


def test_a_worker_whose_node_is_lost_is_retired_and_the_others_are_still_restarted() -> None:
    async def use(watched: Watched) -> None:
        watched.executor.lost_nodes["toy[1]"] = LOST
        await watched.kill(1)
        assert watched.retired == [(1, f"toy[1] was on {LOST}")]
        assert (watched.lost, watched.executor.restarts) == ([], [])
        assert watched.states == ["well", "gone", "well"]
        await watched.kill(2)
        assert [rank for _, rank in watched.restored] == [2]
        assert not watched.supervisor.failed.done()

    watching(use)


def test_a_node_that_is_lost_during_a_restart_retires_the_worker() -> None:
    async def use(watched: Watched) -> None:
        watched.executor.errors["toy[0]"] = [NodeLost("toy[0]", LOST)]
        await watched.kill(0)
        assert [rank for _, rank, _ in watched.lost] == [0]
        assert watched.retired == [(0, f"toy[0] was on {LOST}")]
        assert len(watched.executor.restarts) == 1
        assert watched.states == ["gone", "well", "well"]

    watching(use)


def test_the_last_worker_of_a_role_that_is_retired_ends_it_with_the_node_and_what_to_do() -> None:
    async def use(watched: Watched) -> None:
        watched.executor.lost_nodes |= {"toy[0]": LOST, "toy[1]": LOST, "toy[2]": LOST}
        for rank in (2, 0):
            await watched.kill(rank)
        assert not watched.supervisor.failed.done()
        await watched.kill(1)
        assert str(await watched.error()) == (
            f"toy[1] was on {LOST}, and no worker of toy is left: start Ray on that node again or give toy the devices "
            "of another one, and continue from the last checkpoint with resume=True"
        )
        assert [rank for rank, _ in watched.retired] == [2, 0]

    watching(use)


def test_a_role_that_is_not_restarted_ends_with_the_node_of_any_of_its_workers() -> None:
    async def use(watched: Watched) -> None:
        watched.executor.lost_nodes["toy[1]"] = LOST
        await watched.kill(1)
        assert f"toy[1] was on {LOST}, and no worker of toy is left" in str(await watched.error())
        assert (watched.lost, watched.retired) == ([], [])

    watching(use, restart=False)


def test_a_node_that_ray_calls_lost_after_its_worker_died_ends_a_role_that_is_not_restarted() -> None:
    async def use(watched: Watched) -> None:
        await watched.kill(1)
        assert not watched.supervisor.failed.done()
        watched.executor.lost_nodes["toy[1]"] = LOST
        assert f"toy[1] was on {LOST}, and no worker of toy is left" in str(await watched.error())
        assert ([rank for _, rank, _ in watched.lost], watched.retired) == ([1], [])

    watching(use, restart=False)


def test_a_lost_cluster_says_who_starts_ray_again() -> None:
    theirs, own = str(ClusterLost("it is gone")), str(ClusterLost("it is gone", started_here=True))
    assert ". Start Ray again, and continue from the last checkpoint with " in theirs
    assert ". Continue from the last checkpoint with " in own


def test_a_lost_cluster_ends_it_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def use(watched: Watched) -> None:
        lost = ClusterLost("the head of Ray's cluster has not answered for 8 s")
        watched.executor.cluster_lost = lost
        for rank in range(3):
            await watched.kill(rank)
        assert await watched.error() is lost
        watched.supervisor.fail(lost)
        assert watched.executor.restarts == []

    watching(use)
    assert not caplog.records
