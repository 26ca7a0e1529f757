"""Workers of the local executor in processes of their own: calls, errors, deaths, restarts, and what they cost."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from processes import alive, eventually, gone, printed_pids, state
from thorough import but

from roll.cluster import Cluster, Dispatch, LocalExecutor, Worker, WorkerPlacement, dispatch
from roll.cluster.errors import CallTimedOut, WorkerDied, WorkerError
from roll.cluster.mesh import MeshShape
from roll.config.errors import RunError, UserError
from roll.data import Batch
from roll.data.remote_columns import TokenColumn

T = TypeVar("T")


class Declined(ValueError):
    """An answer of `decline`."""


class Unsendable:
    def __reduce__(self) -> Any:
        raise TypeError("not to be sent")


class Unreadable:
    """Leaves its process, and cannot be made in another."""

    def __reduce__(self) -> Any:
        return _only_in, (os.getpid(),)


def _only_in(pid: int) -> None:
    if os.getpid() != pid:
        raise RuntimeError("made for another process")


class Counted:
    """Counts how often it is packed."""

    packed = 0

    def __reduce__(self) -> Any:
        Counted.packed += 1
        return Counted, ()


class Rank(Worker):
    def __init__(self, place: WorkerPlacement) -> None:
        super().__init__(place)
        self.seen: list[Any] = []
        self.let_go = asyncio.Event()

    @dispatch(Dispatch.ALL)
    def pid(self) -> int:
        return os.getpid()

    @dispatch(Dispatch.ALL)
    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    @dispatch(Dispatch.ALL)
    def group(self) -> int:
        return os.getpgid(0)

    @dispatch(Dispatch.ONE)
    def echo(self, value: Any) -> Any:
        self.seen.append(value)
        return value

    @dispatch(Dispatch.ALL)
    def heard(self) -> list[Any]:
        return self.seen

    @dispatch(Dispatch.DATA, join=lambda results, parts, whole: "joined")
    def total(self, batch: Batch) -> int:
        self.seen.append(int(batch.ids.sum()))
        return self.seen[-1]

    @dispatch(Dispatch.ONE)
    def column(self, batch: Batch) -> TokenColumn:
        return TokenColumn.flat(batch.ids.astype(np.float32), batch.offsets)

    @dispatch(Dispatch.ALL)
    def size(self, array: Any) -> tuple[int, int]:
        return array.nbytes, int(array[-1])

    @dispatch(Dispatch.ONE)
    def zeros(self, count: int) -> Any:
        return np.zeros(count, np.uint8)

    @dispatch(Dispatch.ONE)
    async def wait(self) -> str:
        await self.let_go.wait()
        return "went on"

    @dispatch(Dispatch.ALL)
    def release(self) -> None:
        self.let_go.set()

    @dispatch(Dispatch.ONE)
    def block(self) -> None:
        while True:
            time.sleep(1)

    @dispatch(Dispatch.ONE)
    def spin(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            pass

    @dispatch(Dispatch.ONE)
    def die(self, number: int) -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)

    @dispatch(Dispatch.ONE)
    def leave(self, status: int) -> None:
        os._exit(status)

    @dispatch(Dispatch.ONE, raises=(Declined,))
    def decline(self, error: Exception) -> None:
        raise error

    @dispatch(Dispatch.ONE)
    def unsendable(self) -> Any:
        return Unsendable()

    @dispatch(Dispatch.ONE)
    def unreadable(self) -> Any:
        return Unreadable()

    @dispatch(Dispatch.ONE)
    def say(self, text: str) -> None:
        print(text)

    @dispatch(Dispatch.ONE)
    def child(self) -> int:
        return subprocess.Popen(["sleep", "60"]).pid

    async def close(self) -> None:
        print("closed in order")


class StuckOnClose(Rank):
    async def close(self) -> None:
        time.sleep(3600)  # noqa: ASYNC251


class FailsToClose(Rank):
    async def close(self) -> None:
        raise OSError("no way to close")


def places(count: int, threads: int = 0) -> list[WorkerPlacement]:
    return [WorkerPlacement("rank", rank, count, mesh=MeshShape(shard=count), threads=threads) for rank in range(count)]


def with_ranks(
    use: Callable[[Cluster[Rank]], Coroutine[Any, Any, T]],
    *,
    count: int = 1,
    make: Callable[[WorkerPlacement], Rank] = Rank,
    log: Path | None = None,
    deadline_s: float = 60,
    threads: int = 0,
) -> T:
    async def main() -> T:
        executor = LocalExecutor(deadline_s)
        if log is not None:
            executor.write_logs_to(log)
        try:
            return await asyncio.wait_for(use(await Cluster.start(executor, make, places(count, threads))), 120)
        finally:
            await executor.close()

    return asyncio.run(main())


def ragged(lengths: Sequence[int]) -> Batch:
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    names = np.array([f"s{i}" for i in range(len(lengths))], np.str_)
    return Batch(offsets, {"sample": names, "ids": np.arange(sum(lengths), dtype=np.int32)})


# calls


def test_every_rank_has_a_process_of_its_own_and_gets_every_call_whole(tmp_path: Path) -> None:
    async def use(ranks: Cluster[Rank]) -> list[int]:
        pids = await ranks.call_each(Rank.pid)
        assert len({*pids, os.getpid()}) == 4
        assert not ranks.in_process
        assert await ranks.call(Rank.echo, {"one": 1}) == {"one": 1}  # of rank 0, though all were called
        assert await ranks.call(Rank.total, ragged([3, 2])) == 10  # the whole batch on each, nothing joined
        assert await ranks.call_each(Rank.heard) == [[{"one": 1}, 10]] * 3
        assert await ranks.call_rank(1, Rank.echo, "only you") is None  # what all ranks have comes from rank 0
        assert await ranks.call_each(Rank.heard) == [[{"one": 1}, 10], [{"one": 1}, 10, "only you"], [{"one": 1}, 10]]
        with pytest.raises(TypeError, match=r"Rank\.echo has no result per rank"):
            await ranks.call_each(Rank.echo, 1)
        return pids

    pids = with_ranks(use, count=3, log=tmp_path)
    assert all(gone(pid) for pid in pids)
    assert [(tmp_path / f"rank-{rank}.log").read_text().count("closed in order") for rank in range(3)] == [1, 1, 1]


def test_arguments_for_all_ranks_are_packed_once() -> None:
    async def use(ranks: Cluster[Rank]) -> None:
        Counted.packed = 0
        await ranks.call(Rank.echo, Counted())
        assert Counted.packed == 1
        await ranks.call(Rank.echo, Counted())
        assert Counted.packed == 2
        assert [[type(each) for each in heard] for heard in await ranks.call_each(Rank.heard)] == [[Counted] * 2] * 2

    with_ranks(use, count=2)


def test_token_columns_come_whole() -> None:
    async def use(ranks: Cluster[Rank]) -> None:
        column = await ranks.call(Rank.column, ragged([2, 3]))
        assert column.is_local
        assert ragged([2, 3]).with_columns(ref=column)["ref"].tolist() == [0, 1, 2, 3, 4]

    with_ranks(use)


def test_a_huge_argument_and_a_huge_result_arrive() -> None:
    async def use(ranks: Cluster[Rank]) -> None:
        huge = np.arange(1 << 23, dtype=np.int64)  # 64 MiB
        assert await ranks.call_each(Rank.size, huge) == [(huge.nbytes, (1 << 23) - 1)] * 2
        assert (await ranks.call(Rank.zeros, 100 << 20)).nbytes == 100 << 20

    with_ranks(use, count=2)


def test_calls_begin_in_order_and_those_that_wait_let_others_run() -> None:
    async def use(ranks: Cluster[Rank]) -> None:
        waiting = asyncio.create_task(ranks.call(Rank.wait))
        await asyncio.gather(*(ranks.call(Rank.echo, number) for number in range(50)))
        assert await ranks.call_each(Rank.heard) == [list(range(50))] * 2
        assert not waiting.done()
        await ranks.call(Rank.release)
        assert await waiting == "went on"

    with_ranks(use, count=2)


def test_its_threads_and_devices_are_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    async def use(ranks: Cluster[Rank]) -> tuple[str | None, str | None]:
        return await ranks.call(Rank.environment, "OMP_NUM_THREADS"), await ranks.call(
            Rank.environment, "CUDA_VISIBLE_DEVICES"
        )

    assert with_ranks(use, threads=3) == ("3", "")
    assert with_ranks(use, threads=0) == ("7", "")


def test_what_it_prints_is_in_its_log(tmp_path: Path) -> None:
    async def use(ranks: Cluster[Rank]) -> None:
        await ranks.call(Rank.say, "hello from here")

    with_ranks(use, count=2, log=tmp_path / "logs")
    assert all("hello from here" in (tmp_path / "logs" / f"rank-{rank}.log").read_text() for rank in range(2))


def test_bytes_of_calls_and_results_are_counted() -> None:
    async def main() -> None:
        executor = LocalExecutor()
        try:
            ranks = await Cluster.start(executor, Rank, places(2))
            before = executor.controller_bytes
            await ranks.call(Rank.zeros, 1_000_000)
            assert 1_000_000 < executor.controller_bytes - before < 1_100_000  # from one rank only
        finally:
            await executor.close()

    asyncio.run(main())


# errors


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(UserError("write this instead"), marks=pytest.mark.thorough),
        pytest.param(RunError("cannot"), marks=pytest.mark.thorough),
        Declined("no"),
    ],
)
def test_errors_that_are_answers_pass_as_themselves(error: Exception) -> None:
    async def use(ranks: Cluster[Rank]) -> None:
        with pytest.raises(type(error), match=str(error)) as caught:
            await ranks.call(Rank.decline, error)
        assert any("rank[" in note for note in caught.value.__notes__)
        assert await ranks.call(Rank.echo, 1) == 1

    with_ranks(use, count=2)


def test_other_errors_come_with_their_traceback() -> None:
    async def use(ranks: Cluster[Rank]) -> None:
        with pytest.raises(WorkerError, match=r"rank\[0\] failed in decline: OSError: disk") as caught:
            await ranks.call(Rank.decline, OSError("disk"))
        assert "in decline" in caught.value.trace
        assert await ranks.call(Rank.echo, 1) == 1

    with_ranks(use)


def test_what_cannot_be_sent_is_said_and_the_worker_works_on() -> None:
    async def use(ranks: Cluster[Rank]) -> None:
        with pytest.raises(TypeError, match=r"rank\[0\]\.echo cannot be called: its arguments cannot be pickled"):
            await ranks.call(Rank.echo, Unsendable())
        with pytest.raises(WorkerError, match="that cannot be sent to another process"):
            await ranks.call(Rank.echo, Unreadable())
        with pytest.raises(WorkerError, match="that cannot be sent to another process"):
            await ranks.call(Rank.unsendable)
        with pytest.raises(WorkerError, match="made for another process"):
            await ranks.call(Rank.unreadable)
        assert await ranks.call(Rank.echo, 1) == 1

    with_ranks(use)


@pytest.mark.parametrize(
    ("error", "kind"), [(UserError("no such model"), UserError), (ZeroDivisionError("oops"), WorkerError)]
)
def test_a_start_that_fails_says_why_and_leaves_no_process(
    tmp_path: Path, error: Exception, kind: type[Exception]
) -> None:
    def make(place: WorkerPlacement) -> Rank:
        (tmp_path / str(place.rank)).write_text(str(os.getpid()))
        if place.rank == 1:
            raise error
        return Rank(place)

    async def use(ranks: Cluster[Rank]) -> None:
        raise AssertionError("it started")

    with pytest.raises(kind, match=str(error)):
        with_ranks(use, count=2, make=make)
    assert all(gone(int(file.read_text())) for file in tmp_path.iterdir())


def test_a_start_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    def make(place: WorkerPlacement) -> Rank:
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(3600)
        return Rank(place)

    async def main() -> None:
        executor = LocalExecutor(start_deadline_s=8)
        try:
            with pytest.raises(RunError, match=r"the workers of rank have not started within 8 s"):
                await Cluster.start(executor, make, places(1))
        finally:
            await executor.close()

    asyncio.run(main())
    assert gone(int((tmp_path / "pid").read_text()))


# pings, deaths, restarts


def test_a_busy_worker_answers_pings() -> None:
    async def use(ranks: Cluster[Rank]) -> None:
        for busy in (ranks.call(Rank.block), ranks.call(Rank.spin, 3600.0)):
            call = asyncio.create_task(busy)
            await asyncio.sleep(0)
            for _ in range(3):
                await ranks.ping(0, 20)
            assert not call.done()
            await ranks.restart(0)
            with pytest.raises(WorkerDied):
                await call

    with_ranks(use)


def test_a_stopped_worker_answers_no_ping_and_can_be_ended() -> None:
    async def use(ranks: Cluster[Rank]) -> int:
        pid = await ranks.call(Rank.pid)
        os.kill(pid, signal.SIGSTOP)
        assert eventually(lambda: state(pid) == "T")
        with pytest.raises(CallTimedOut, match=r"rank\[0\] has not answered ping for 0\.2 s"):
            await ranks.ping(0, 0.2)
        await ranks.end(0)
        with pytest.raises(WorkerDied, match="was killed by SIGKILL"):
            await ranks.ping(0, 20)
        return pid

    assert gone(with_ranks(use))


@pytest.mark.parametrize(
    ("method", "argument", "says"),
    [
        (Rank.die, int(signal.SIGKILL), "was killed by SIGKILL"),
        pytest.param(Rank.die, int(signal.SIGABRT), "was killed by SIGABRT", marks=pytest.mark.thorough),
        (Rank.leave, 3, "exited with status 3"),
        pytest.param(Rank.leave, 0, "exited with status 0", marks=pytest.mark.thorough),
    ],
)
def test_a_death_ends_all_calls_in_flight_and_later_ones(tmp_path: Path, method: Any, argument: int, says: str) -> None:
    async def use(ranks: Cluster[Rank]) -> int:
        await ranks.call(Rank.say, "its last words")
        grandchild = await ranks.call(Rank.child)
        waiting = asyncio.create_task(ranks.call(Rank.wait))
        with pytest.raises(WorkerDied, match=rf"rank\[0\] died: its process {says}") as caught:
            await ranks.call(method, argument)
        assert "its last words" in str(caught.value)
        with pytest.raises(WorkerDied, match=says):
            await waiting
        with pytest.raises(WorkerDied, match=says):
            await ranks.call(Rank.echo, 1)
        with pytest.raises(WorkerDied, match=says):
            await ranks.ping(0, 20)
        return grandchild

    assert gone(with_ranks(use, log=tmp_path))


def test_a_death_while_a_huge_argument_is_sent_is_noticed() -> None:
    async def use(ranks: Cluster[Rank]) -> None:
        pid = await ranks.call(Rank.pid)
        os.kill(pid, signal.SIGSTOP)  # it takes nothing any more
        call = asyncio.create_task(ranks.call(Rank.size, np.zeros(32 << 20, np.uint8)))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="SIGKILL"):
            await call

    with_ranks(use)


def test_a_restart_makes_the_worker_again_in_a_new_process(tmp_path: Path) -> None:
    async def use(ranks: Cluster[Rank]) -> None:
        before = await ranks.call(Rank.pid)
        await ranks.call(Rank.echo, "forgotten")
        waiting = asyncio.create_task(ranks.call(Rank.wait))
        await asyncio.sleep(0)
        await ranks.restart(0)
        with pytest.raises(WorkerDied):
            await waiting
        assert not alive(before)
        assert (ranks.restart_count(0), await ranks.call(Rank.heard)) == (1, [])
        with pytest.raises(WorkerDied):
            await ranks.call(Rank.die, int(signal.SIGKILL))
        await ranks.restart(0)
        assert (ranks.restart_count(0), await ranks.call(Rank.echo, 5)) == (2, 5)

    with_ranks(use, log=tmp_path)


def test_a_restart_that_failed_can_be_tried_again(tmp_path: Path) -> None:
    broken = tmp_path / "broken"

    def make(place: WorkerPlacement) -> Rank:
        if broken.exists():
            raise UserError("not now")
        return Rank(place)

    async def use(ranks: Cluster[Rank]) -> None:
        broken.touch()
        with pytest.raises(UserError, match="not now"):
            await ranks.restart(0)
        broken.unlink()
        await ranks.restart(0)
        assert await ranks.call(Rank.echo, 5) == 5

    with_ranks(use, make=make)


@pytest.mark.parametrize("make", [StuckOnClose, FailsToClose])
def test_closing_ends_a_worker_that_does_not_close(make: type[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll.cluster.executor._CLOSE_S", 0.5)

    async def use(ranks: Cluster[Rank]) -> int:
        return await ranks.call(Rank.pid)

    assert gone(with_ranks(use, make=make))


def test_a_call_that_a_rank_does_not_answer_by_its_deadline_ends_the_group() -> None:
    async def use(ranks: Cluster[Rank]) -> None:
        pid = await ranks.call(Rank.pid)
        with pytest.raises(CallTimedOut, match=r"rank\[0\] has not answered spin"):
            await ranks.call(Rank.spin, 60.0)
        assert gone(pid)
        await ranks.restart(0)
        assert await ranks.call(Rank.echo, 1) == 1

    with_ranks(use, deadline_s=2)


# spares


class Note:
    """Says in which process it was called."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __call__(self) -> None:
        self._file.write_text(str(os.getpid()))


def test_a_worker_is_restarted_in_its_spare_or_where_that_is_lost_in_another_process(tmp_path: Path) -> None:
    note = tmp_path / "spare.txt"

    def spare() -> int:
        return int(note.read_text())

    async def main() -> None:
        executor = LocalExecutor(60)
        executor.reserve(places(1, 0), places(1, 0))
        ranks = await Cluster.start(executor, Rank, places(1, 0))
        try:
            await ranks.keep_spares(Note(note))
            await ranks.keep_spares(Note(tmp_path / "second.txt"))
            assert not (tmp_path / "second.txt").exists(), "one is enough"
            first = spare()
            assert await ranks.call(Rank.pid) != first
            await ranks.restart(0)
            assert await ranks.call(Rank.pid) == first
            await ranks.keep_spares(Note(note))
            os.kill(spare(), signal.SIGKILL)
            await ranks.restart(0)
            assert await ranks.call(Rank.pid) not in (first, spare())
            await ranks.keep_spares(Note(note))
        finally:
            await executor.close()
        assert gone(spare())

    asyncio.run(main())


# signals


@pytest.mark.parametrize("number", but({signal.SIGINT}, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))
def test_signals_that_stop_a_run_are_left_to_the_controller(tmp_path: Path, number: signal.Signals) -> None:
    async def use(ranks: Cluster[Rank]) -> None:
        pid = await ranks.call(Rank.pid)
        assert await ranks.call(Rank.group) == pid != os.getpgid(0)  # the terminal's Ctrl-C does not reach it
        os.kill(pid, number)
        assert await ranks.call(Rank.echo, 1) == 1
        log = tmp_path / "rank-0.log"
        assert await asyncio.to_thread(eventually, lambda: number.name in log.read_text())

    with_ranks(use, log=tmp_path)


PARENT = """
import asyncio, os, signal, sys
from test_process_handle import Rank, places
from roll.cluster import Cluster, LocalExecutor

async def main():
    ranks = await Cluster.start(LocalExecutor(), Rank, places(2))
    pids = await ranks.call_each(Rank.pid)
    busy = asyncio.create_task(ranks.call(Rank.block))
    print(*pids, flush=True)
    await busy

asyncio.run(main())
"""


@pytest.mark.parametrize("number", but({signal.SIGKILL}, [signal.SIGKILL, signal.SIGTERM]))
def test_ranks_die_with_the_controller_whatever_they_do(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    process, pids = printed_pids(tmp_path / "parent.py")
    try:
        assert len(pids) == 2
        assert all(alive(pid) for pid in pids)
        process.send_signal(number)
        assert process.wait(20) == -number
        assert all(gone(pid, within_s=10) for pid in pids)
    finally:
        process.kill()
