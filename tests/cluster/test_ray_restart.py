"""Workers that are Ray actors, killed, stopped and brought back: the same handle, the same place, another process."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import ray
from local_ray import connect
from processes import alive, eventually

from roll.cluster import (
    Cluster,
    Dispatch,
    RestartPolicy,
    Supervisor,
    Worker,
    WorkerPlacement,
    dispatch,
    ray_actor,
    ray_executor,
)
from roll.cluster.errors import CallTimedOut, TokensLost, WorkerDied, WorkerError
from roll.cluster.pid_handle import PidHandle
from roll.cluster.ray_actor import ActorLocation
from roll.cluster.ray_executor import RayExecutor
from roll.config.errors import RunError
from roll.config.schema import RayConfig
from roll.data import Batch
from roll.data.remote_columns import ColumnBlock, TokenColumn

pytestmark = [pytest.mark.ray, pytest.mark.thorough]

T = TypeVar("T")


class Mortal(Worker):
    """Says in which process it is; some cannot be made a second time."""

    def __init__(self, place: WorkerPlacement, notes: Path) -> None:
        super().__init__(place)
        self.notes = notes
        self.memory: list[str] = []
        print(f"{place.name} starts in process {os.getpid()}", flush=True)
        stopped = notes / f"{place.name}.stopped"
        if stopped.is_file():
            stopped.unlink()
            os.kill(os.getpid(), signal.SIGSTOP)
        broken = notes / f"{place.name}.broken"
        if broken.is_file():
            time.sleep(float(broken.read_text()))
            raise OSError(f"{place.name} does not start")

    @dispatch(Dispatch.ALL)
    def pid(self) -> int:
        return os.getpid()

    @dispatch(Dispatch.ONE)
    def cores(self) -> set[int]:
        return os.sched_getaffinity(0)

    @dispatch(Dispatch.ONE)
    def remember(self, word: str) -> list[str]:
        self.memory.append(word)
        return self.memory

    @dispatch(Dispatch.ONE)
    async def wait(self) -> None:
        await asyncio.sleep(60)

    @dispatch(Dispatch.ONE)
    def block(self, seconds: float) -> str:
        time.sleep(seconds)
        return "awake"

    @dispatch(Dispatch.ONE)
    def spin(self, until: Path) -> None:
        """Keeps the interpreter busy until there is such a file."""
        while not until.exists():
            sum(range(10_000))

    @dispatch(Dispatch.ONE)
    def tokens(self, count: int) -> ColumnBlock:
        return ColumnBlock({"ids": np.arange(count, dtype=np.int32)})

    @dispatch(Dispatch.ONE)
    def added(self, batch: Batch) -> int:
        return int(batch.ids.sum())

    @dispatch(Dispatch.ONE)
    async def ask(self, others: Cluster[Mortal]) -> list[int]:
        return await others.call_each(Mortal.pid)


@dataclass(frozen=True)
class Roles:
    """Two roles on Ray, started once for this file; each test leaves all their workers alive."""

    runner: asyncio.Runner
    executor: RayExecutor
    mortals: Cluster[Mortal]
    other: Cluster[Mortal]
    notes: Path

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(asyncio.wait_for(work, 600))


@pytest.fixture(scope="module")
def roles(own_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roles]:
    from ray import cloudpickle

    here, notes = sys.modules[__name__], tmp_path_factory.mktemp("notes")
    cloudpickle.register_pickle_by_value(here)  # workers cannot import a test
    executor = RayExecutor(RayConfig(object_store_gb=0.1, start_deadline_s=600, call_deadline_s=300), notes / "logs")
    connect(executor)
    with asyncio.Runner() as runner:
        places = [WorkerPlacement("mortal", rank, 2, threads=1, cores=(0,)) for rank in range(2)]
        alone = [WorkerPlacement("other", threads=1)]

        async def start() -> list[Cluster[Mortal]]:
            executor.reserve(places + alone)
            return [await Cluster.start(executor, lambda place: Mortal(place, notes), each) for each in (places, alone)]

        try:
            mortals, other = runner.run(start())
            yield Roles(runner, executor, mortals, other, notes)
        finally:
            runner.run(executor.close())
            cloudpickle.unregister_pickle_by_value(here)


def pids_in(log: Path) -> list[int]:
    return [int(line.split()[-1]) for line in log.read_text().splitlines() if "starts in process" in line]


async def lost(pending: Coroutine[Any, Any, Any]) -> str:
    with pytest.raises(WorkerDied) as caught:
        await pending
    return str(caught.value).splitlines()[0]


# health


def test_a_ping_is_answered_while_a_method_blocks_the_worker(roles: Roles) -> None:
    async def use() -> None:
        blocked = asyncio.create_task(roles.mortals.call_rank(0, Mortal.block, 10))
        await asyncio.sleep(0.2)
        for _ in range(5):
            await roles.mortals.ping(0, 8)
        assert not blocked.done()
        behind = asyncio.create_task(roles.mortals.call_rank(0, Mortal.pid))
        await asyncio.sleep(0.2)
        assert not behind.done(), "the method does block it"
        assert await blocked == "awake"
        await behind
        busy = asyncio.create_task(roles.mortals.call_rank(0, Mortal.spin, roles.notes / "pinged"))
        await asyncio.sleep(0.2)
        await roles.mortals.ping(0, 60)
        assert not busy.done()
        (roles.notes / "pinged").touch()
        await busy

    roles.run(use())


def test_a_stopped_worker_does_not_answer_until_it_goes_on(roles: Roles) -> None:
    async def use() -> None:
        pid = await roles.mortals.call_rank(1, Mortal.pid)
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(CallTimedOut, match=r"^mortal\[1\] has not answered ping for 0\.3 s$"):
                await roles.mortals.ping(1, 0.3)
        finally:
            os.kill(pid, signal.SIGCONT)
        await roles.mortals.ping(1, 5)
        assert await roles.mortals.call_rank(1, Mortal.pid) == pid

    roles.run(use())


# restart


@pytest.mark.parametrize("how", ["killed", "stopped", "blocked"])
def test_a_worker_is_restarted_behind_the_same_handle(roles: Roles, how: str) -> None:
    async def use() -> None:
        mortals, handle = roles.mortals, roles.mortals._handles[1]
        before, others = mortals.restart_count(1), await mortals.call_rank(0, Mortal.pid)
        old, cores = await mortals.call_rank(1, Mortal.pid), await mortals.call_rank(1, Mortal.cores)
        await mortals.call_rank(1, Mortal.remember, "then")
        copy = pickle.dumps(handle)
        pending = asyncio.create_task(lost(mortals.call_rank(1, Mortal.wait)))
        await asyncio.sleep(0.1)
        if how == "blocked":
            blocked = asyncio.create_task(lost(mortals.call_rank(1, Mortal.block, 60)))
            await asyncio.sleep(0.1)
        else:
            os.kill(old, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        await mortals.restart(1)
        assert not alive(old)
        assert (await pending).startswith("mortal[1] died: ")
        if how == "blocked":
            assert (await blocked).startswith("mortal[1] died: ")

        assert (handle is mortals._handles[1], mortals.restart_count(1)) == (True, before + 1)
        new = await mortals.call_rank(1, Mortal.pid)
        assert new not in (old, others)
        assert await mortals.call_rank(1, Mortal.cores) == cores
        assert await mortals.call_rank(1, Mortal.remember, "now") == ["now"], "it was made anew"
        assert await mortals.call_rank(0, Mortal.pid) == others
        log = roles.notes / "logs" / "mortal-1.log"
        assert await asyncio.to_thread(eventually, lambda: new in pids_in(log))
        assert pids_in(log).index(old) < pids_in(log).index(new)

        stale, fresh = pickle.loads(copy), pickle.loads(pickle.dumps(handle))
        assert (stale.restart_count, fresh.restart_count) == (before, before + 1)
        assert (await lost(stale.call("pid", [], {}))).startswith("mortal[1] died: ")
        assert (await lost(stale.ping(5))).startswith("mortal[1] died: ")
        assert await fresh.call("pid", [], {}) == new

    roles.run(use())


def test_a_cluster_sent_again_reaches_the_new_worker(roles: Roles) -> None:
    async def use() -> None:
        assert await roles.other.call(Mortal.ask, roles.mortals) == await roles.mortals.call_each(Mortal.pid)
        await roles.mortals.restart(0)
        assert await roles.other.call(Mortal.ask, roles.mortals) == await roles.mortals.call_each(Mortal.pid)
        travelled = pickle.loads(pickle.dumps(roles.mortals))
        with pytest.raises(RunError, match=r"^mortal\[0\] cannot be restarted here: only where its cluster was started$"):
            await travelled.restart(0)

    roles.run(use())


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_stopped_process_is_ended_on_its_node(roles: Roles, monkeypatch: pytest.MonkeyPatch, elsewhere: bool) -> None:
    home = roles.mortals._handles[0]._location  # type: ignore[attr-defined]
    assert home.process.pid == roles.run(roles.mortals.call_rank(0, Mortal.pid))
    if elsewhere:
        monkeypatch.setattr(ray_actor, "this_node", lambda: "another node")
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        process = PidHandle.of(sleeper.pid)
        os.kill(sleeper.pid, signal.SIGSTOP)
        assert roles.run(ActorLocation(home.node, process).kill(10))
        assert sleeper.wait(10) == -signal.SIGKILL
    assert roles.run(ActorLocation(home.node, process).kill(10)), "and again"
    assert roles.run(ActorLocation("0a" * 28, process).kill(10)), "its node is gone"


@pytest.mark.thorough
def test_a_worker_that_falls_silent_while_it_starts_again_is_given_up_and_ended(
    roles: Roles, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use() -> None:
        mortals, before = roles.mortals, roles.mortals.restart_count(1)
        (roles.notes / "mortal[1].stopped").touch()
        with monkeypatch.context() as patch:
            patch.setattr(roles.executor, "_silent_s", 2.0)
            with pytest.raises(CallTimedOut, match=r"^mortal\[1\] has not answered ping for 1 s$"):
                await mortals.restart(1)
        assert not alive(pids_in(roles.notes / "logs" / "mortal-1.log")[-1])
        await mortals.restart(1)
        assert mortals.restart_count(1) == before + 1
        await mortals.call_rank(1, Mortal.pid)

    roles.run(use())


def test_a_restart_that_fails_leaves_a_dead_worker_that_may_be_restarted_again(
    roles: Roles, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use() -> None:
        mortals, before = roles.mortals, roles.mortals.restart_count(1)
        pid = await mortals.call_rank(1, Mortal.pid)
        with monkeypatch.context() as patch:
            patch.setattr(PidHandle, "end", lambda process, deadline_s: False)
            with pytest.raises(RunError, match=rf"^mortal\[1\] \(process {pid} on .*\) could not be ended within 60 s$"):
                await mortals.restart(1)
        broken = roles.notes / "mortal[1].broken"
        broken.write_text("0")
        with pytest.raises(WorkerError, match=r"^mortal\[1\] failed in its start: OSError: mortal\[1\] does not start\n"):
            await mortals.restart(1)
        broken.write_text("60")
        with monkeypatch.context() as patch:
            patch.setattr(roles.executor, "_config", RayConfig(start_deadline_s=0.5))
            with pytest.raises(RunError, match=r"^mortal\[1\] has not started within 0\.5 s \(ray\.start_deadline_s\)$"):
                await mortals.restart(1)
        await lost(mortals.call_rank(1, Mortal.pid))
        first = asyncio.create_task(mortals.restart(1))
        await asyncio.sleep(0.5)
        with pytest.raises(RunError, match=r"^mortal\[1\] is being restarted already$"):
            await mortals.restart(1)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert mortals.restart_count(1) == before
        broken.unlink()
        await mortals.restart(1)
        assert await mortals.call_rank(1, Mortal.pid) > 0
        assert mortals.restart_count(1) == before + 1

    roles.run(use())


def test_only_its_own_executor_restarts_a_worker(roles: Roles) -> None:
    async def use() -> None:
        with pytest.raises(RunError, match=r"^mortal\[0\] cannot be restarted: this executor runs no such worker$"):
            await RayExecutor(RayConfig()).restart(roles.mortals._handles[0])

    roles.run(use())


# supervision


def test_workers_that_are_killed_or_stopped_come_back_by_themselves(roles: Roles) -> None:
    async def use() -> None:
        supervisor = Supervisor(RestartPolicy(ping_s=0.1, hang_s=2, backoff_s=0.1))
        events: list[str] = []
        back = asyncio.Semaphore(0)

        async def restored(rank: int) -> None:
            await roles.mortals.call_rank(rank, Mortal.pid)
            events.append(f"restored {rank}")
            back.release()

        supervisor.watch(roles.mortals, lambda rank, why: events.append(f"lost {rank}: {why}"), restored)
        try:
            blocked = asyncio.create_task(roles.mortals.call_rank(0, Mortal.block, 3))
            stopped = await roles.mortals.call_rank(1, Mortal.pid)
            os.kill(stopped, signal.SIGSTOP)
            await back.acquire()
            assert await blocked == "awake", "who only works is left alone"
            killed = await roles.mortals.call_rank(0, Mortal.pid)
            os.kill(killed, signal.SIGKILL)
            await back.acquire()
            first, second, third, fourth = (event.splitlines()[0] for event in events)
            assert first == "lost 1: mortal[1] has not answered a ping for 2 s"
            assert third.startswith("lost 0: mortal[0] died: ")
            assert (second, fourth) == ("restored 1", "restored 0")
            assert not {stopped, killed} & set(await roles.mortals.call_each(Mortal.pid))
            assert [each.state for each in supervisor.status()] == ["well", "well"]
        finally:
            await supervisor.close()

    roles.run(use())


# tokens


def test_tokens_are_lost_with_the_worker_that_held_them_and_said_to_be(roles: Roles) -> None:
    async def use() -> None:
        count = 300_000
        kept, gone = [await roles.mortals.call_rank(rank, Mortal.tokens, count) for rank in range(2)]
        total = count * (count - 1) // 2
        assert await roles.other.call(Mortal.added, batch_of(gone, count)) == total
        await roles.mortals.restart(1)
        await asyncio.sleep(1.5)  # Ray frees them within a second
        with pytest.raises(TokensLost, match=r"^tokens that a worker held are lost \(OwnerDiedError\)") as caught:
            await roles.executor.fetch(batch_of(gone, count))
        assert isinstance(caught.value, RunError)
        with pytest.raises(TokensLost, match=r"^tokens that a worker held are lost \(OwnerDiedError\)") as caught:
            await roles.other.call(Mortal.added, batch_of(gone, count))
        assert caught.value.__notes__[0].startswith("in other[0].added (process ")
        assert (await roles.executor.fetch(batch_of(kept, count))).ids.sum() == total

    roles.run(use())


def batch_of(block: ColumnBlock, count: int) -> Batch:
    column = TokenColumn((block,), np.array([0]), np.array([0]), "ids")
    return Batch(np.array([0, count]), {"ids": column})


# processes


def test_a_process_is_told_from_a_later_one_of_its_number() -> None:
    this = PidHandle.of(os.getpid())
    assert this.is_there
    assert this == PidHandle.of(os.getpid())
    assert not PidHandle(this.pid, "0").is_there
    assert PidHandle(this.pid, "0").end(0), "nobody is killed"


def test_a_process_that_has_left_only_its_exit_status_is_gone() -> None:
    pid = os.fork()
    if not pid:
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitpid(pid, os.WUNTRACED)
    process = PidHandle.of(pid)
    assert process.is_there
    assert process.end(5)
    assert b"State:\tZ" in Path(f"/proc/{pid}/status").read_bytes()
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert not process.is_there


# end


def test_closing_in_the_middle_of_a_restart_leaves_nothing(roles: Roles, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last test of this file: it closes its executor."""
    monkeypatch.setattr(ray_executor, "_CLOSE_S", 0.5)

    async def use() -> None:
        (roles.notes / "mortal[1].broken").write_text("3")
        restarting = asyncio.create_task(roles.mortals.restart(1))
        log = roles.notes / "logs" / "mortal-1.log"
        starts = len(pids_in(log))
        assert await asyncio.to_thread(eventually, lambda: len(pids_in(log)) > starts)
        await roles.executor.close()
        with pytest.raises((WorkerDied, RunError)):
            await restarting
        assert not ray.is_initialized()
        assert eventually(lambda: not any(map(alive, pids_in(log))))
        with pytest.raises(RunError, match=r"^mortal\[0\] cannot be restarted: "):
            await roles.mortals.restart(0)
        for call in (roles.mortals.call_rank(0, Mortal.pid), roles.mortals.ping(0, 5)):
            assert await lost(call) == "mortal[0] died: Ray has ended"
        assert not ray.is_initialized(), "nobody started it again"

    roles.run(use())
