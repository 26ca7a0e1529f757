"""The life of workers that are Ray actors: they start or say why not, die alone, and leave nothing behind."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
from processes import alive, eventually

from roll.cluster import Cluster, Dispatch, Worker, WorkerPlacement, dispatch, ray_connection
from roll.cluster import ray_executor as module
from roll.cluster.errors import CallTimedOut, WorkerDied, WorkerError
from roll.cluster.ray_executor import RayExecutor
from roll.config.errors import RunError, UserError
from roll.config.schema import RayConfig

pytestmark = pytest.mark.ray

Use = Callable[[RayExecutor], Coroutine[Any, Any, Any]]


class Mortal(Worker):
    """Notes in a folder which process it is and when it was closed; some cannot be made, some cannot be closed."""

    def __init__(self, place: WorkerPlacement, notes: Path, broken: str = "") -> None:
        super().__init__(place)
        self._notes, self._broken = notes, broken
        note = notes / f"{place.name}.pid"
        note.with_suffix(".part").write_text(str(os.getpid()))
        note.with_suffix(".part").rename(note)  # whole or not at all: this process may be ended here
        print(f"{place.name} prints as it starts")
        if broken == "start":
            raise OSError(f"{place.name} does not start")
        if broken == "user":
            raise UserError("no such model: write another")
        if broken == "start hangs":
            time.sleep(60)

    @dispatch(Dispatch.ALL)
    def pid(self) -> int:
        return os.getpid()

    @dispatch(Dispatch.ALL)
    def say(self, word: str) -> None:
        print(f"{self.placement.name} prints {word}", flush=True)
        print(f"{self.placement.name} complains {word}", file=sys.stderr, flush=True)
        logging.getLogger("toy").warning("%s logs %s", self.placement.name, word)
        os.system(f"echo {self.placement.role}-{self.placement.rank} shouts {word}")

    @dispatch(Dispatch.ALL)
    async def wait(self) -> None:
        print(f"{self.placement.name} waits", flush=True)
        await asyncio.sleep(60)

    @dispatch(Dispatch.ALL)
    def block(self) -> None:
        time.sleep(60)

    async def close(self) -> None:
        with (self._notes / "closed").open("a") as file:
            file.write(f"{self.placement.name}\n")
        if self._broken == "close":
            raise OSError(f"{self.placement.name} does not close")
        if self._broken == "close hangs":
            await asyncio.sleep(60)


@pytest.fixture(scope="module", autouse=True)
def on_ray(shared_ray: None) -> Iterator[None]:
    from ray import cloudpickle

    here = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(here)  # workers cannot import a test
    yield
    cloudpickle.unregister_pickle_by_value(here)


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    return tmp_path


def with_executor(use: Use, config: RayConfig | None = None, logs: Path | None = None) -> None:
    """Whatever happens in `use`, its executor is closed, and nothing of it is left."""

    async def main() -> None:
        executor = RayExecutor(config or RayConfig(start_deadline_s=600, call_deadline_s=300), logs)
        try:
            await asyncio.wait_for(use(executor), 600)
        finally:
            await executor.close()
        await executor.close()
        assert ray.is_initialized(), "it was there before"
        assert eventually(lambda: free_cores() == ray.cluster_resources()["CPU"])

    asyncio.run(main())


async def start(
    executor: RayExecutor, notes: Path, names: Sequence[str], broken: dict[str, str] | None = None
) -> list[Cluster[Mortal]]:
    """One role a name, each of one worker; or of as many as `name*3` says."""
    counts = [(name.partition("*")[0], int(name.partition("*")[2] or 1)) for name in names]
    places = [[WorkerPlacement(name, rank, count, threads=1) for rank in range(count)] for name, count in counts]
    executor.reserve([place for some in places for place in some])
    states = broken or {}
    return [
        await Cluster.start(executor, lambda place: Mortal(place, notes, states.get(place.name, "")), some)
        for some in places
    ]


def free_cores() -> float:
    return float(ray.available_resources().get("CPU", 0))


def are_gone(notes: Path, count: int) -> bool:
    """Whether so many workers have been, and no process of them is."""
    pids = [int(note.read_text()) for note in notes.glob("*.pid")]
    return len(set(pids)) == count and eventually(lambda: not any(alive(pid) for pid in pids))


def closed(notes: Path) -> list[str]:
    return (notes / "closed").read_text().split()


# start


@pytest.mark.thorough
def test_more_workers_than_cores_start_and_leave_nothing(notes: Path) -> None:
    async def use(executor: RayExecutor) -> None:
        before = free_cores()
        (many,) = await start(executor, notes, ["many*6"])
        assert len(set(await many.call_each(Mortal.pid))) == 6
        assert free_cores() == 0 or before > 6

    with_executor(use)
    assert are_gone(notes, 6)
    assert closed(notes) == [f"many[{rank}]" for rank in reversed(range(6))]


@pytest.mark.parametrize(
    ("broken", "kind", "said"),
    [
        ("start", WorkerError, "b[1] failed in its start: OSError: b[1] does not start"),
        pytest.param("user", UserError, "no such model: write another", marks=pytest.mark.thorough),
    ],
)
def test_a_worker_that_does_not_start_says_why_and_the_others_go(
    notes: Path, broken: str, kind: type[Exception], said: str
) -> None:
    async def use(executor: RayExecutor) -> None:
        with pytest.raises(kind) as caught:
            await start(executor, notes, ["a", "b*2"], {"b[1]": broken})
        process = f"process {(notes / 'b[1].pid').read_text()} on {socket.gethostname()}"
        assert str(caught.value).splitlines()[0] == said
        if kind is UserError:
            assert caught.value.__notes__ == [f"in b[1].start ({process})"]
        else:
            assert process in str(caught.value)

    with_executor(use)
    assert are_gone(notes, 3) or are_gone(notes, 2)  # the other one of `b` may have been ended before it began
    assert "a[0]" in closed(notes)


def test_a_start_that_hangs_is_named_in_time_and_ended(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CLOSE_S", 0.5)

    async def use(executor: RayExecutor) -> None:
        with pytest.raises(
            RunError, match=r"^the workers of slow have not started within 3 s \(ray\.start_deadline_s\)$"
        ):
            await start(executor, notes, ["slow"], {"slow[0]": "start hangs"})

    with_executor(use, RayConfig(start_deadline_s=3))
    assert are_gone(notes, len(list(notes.glob("*.pid")))), "it may not even have begun"


def test_a_log_that_cannot_be_written_is_the_users_error(notes: Path) -> None:
    (notes / "file").touch()

    async def use(executor: RayExecutor) -> None:
        with pytest.raises(
            UserError, match=rf"{socket.gethostname()} cannot write {notes}/file/logs/a-0\.log \(Not a dir"
        ):
            await start(executor, notes, ["a"])

    with_executor(use, logs=notes / "file" / "logs")


# death and hanging


def test_a_killed_worker_is_named_with_its_last_words_and_the_others_go_on(notes: Path) -> None:
    async def use(executor: RayExecutor) -> None:
        (toys,) = await start(executor, notes, ["toy*2"])
        pid = await toys.call_rank(1, Mortal.pid)
        pending = asyncio.create_task(toys.call_rank(1, Mortal.wait))
        log = notes / "logs" / "toy-1.log"
        assert await asyncio.to_thread(eventually, lambda: "toy[1] waits" in log.read_text())
        os.kill(pid, signal.SIGKILL)
        for call in (pending, toys.call_rank(1, Mortal.pid), toys.call(Mortal.pid)):
            with pytest.raises(WorkerDied) as caught:
                await call
            first, where, *rest = str(caught.value).splitlines()
            assert first.startswith("toy[1] died: ")
            assert where == f"  the end of {log}:"
            assert rest[-1] == "    toy[1] waits"
        assert await toys.call_rank(0, Mortal.pid) != pid

    with_executor(use, logs=notes / "logs")
    assert are_gone(notes, 2)
    assert closed(notes) == ["toy[0]"]


def test_a_worker_that_blocks_is_named_in_time_and_ended(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CLOSE_S", 0.5)

    async def use(executor: RayExecutor) -> None:
        stuck, other = await start(executor, notes, ["stuck", "other"])
        began = time.monotonic()
        with pytest.raises(CallTimedOut, match=r"^stuck\[0\] has not answered block for 0\.5 s$"):
            await Cluster("stuck", stuck._handles, 0.5).call(Mortal.block)
        assert time.monotonic() - began < 3
        assert await other.call(Mortal.pid) > 0

    with_executor(use)
    assert are_gone(notes, 2)
    assert closed(notes) == ["other[0]"]


# logs


def test_each_worker_writes_what_it_prints_to_a_file_of_its_own(notes: Path) -> None:
    async def use(executor: RayExecutor) -> None:
        executor.write_logs_to(notes / "logs")
        (toys,) = await start(executor, notes, ["toy*2"])
        await toys.call_rank(0, Mortal.say, "zero")
        await toys.call_rank(1, Mortal.say, "one")

    with_executor(use)
    assert sorted(log.name for log in (notes / "logs").iterdir()) == ["toy-0.log", "toy-1.log"]
    for rank, word in enumerate(["zero", "one"]):
        name, lines = f"toy[{rank}]", (notes / "logs" / f"toy-{rank}.log").read_text().splitlines()
        assert f"INFO roll.cluster.worker_runtime: {name} is process " in lines[0]
        ready = [
            number
            for number, line in enumerate(lines)
            if line.endswith(f"INFO roll.cluster.worker_runtime: {name} is ready")
        ]
        assert ready == [2]
        assert [line.split("WARNING toy: ")[-1] for line in lines[1:2] + lines[3:]] == [
            f"{name} prints as it starts",
            *(f"{name} {does} {word}" for does in ("prints", "complains", "logs")),
            f"toy-{rank} shouts {word}",
        ]


# close


@pytest.mark.thorough
def test_workers_close_youngest_first_also_when_one_fails_or_hangs(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CLOSE_S", 0.5)

    async def use(executor: RayExecutor) -> None:
        await start(executor, notes, ["a*2", "b", "c"], {"b[0]": "close", "c[0]": "close hangs"})
        began = time.monotonic()
        await executor.close()
        assert time.monotonic() - began < 3
        assert are_gone(notes, 4)

    with_executor(use)
    assert closed(notes) == ["c[0]", "b[0]", "a[1]", "a[0]"]


def test_an_executor_that_started_nothing_closes() -> None:
    async def main() -> None:
        await RayExecutor(RayConfig()).close()

    asyncio.run(main())


# addresses


@pytest.mark.parametrize("host", ["127.0.0.1", "ray://localhost"])
def test_an_address_nobody_listens_at_is_refused_soon(host: str) -> None:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(UserError, match=rf"^nothing answers at ray\.address='{host}:{port}' .*refused.*: is Ray running"):
        ray_connection.connect(RayConfig(address=f"{host}:{port}"))
    assert time.monotonic() - began < 6


@pytest.mark.parametrize(
    "error", [Exception("The current node timed out during startup."), RuntimeError("no"), ConnectionError("no")]
)
def test_a_ray_that_does_not_start_is_a_message(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**settings: object) -> None:
        raise error

    monkeypatch.setattr(ray_connection.ray, "init", init)
    with pytest.raises(UserError, match=f"^Ray could not be reached or started on this machine: {error}"):
        ray_connection.connect(RayConfig())


def test_a_mistake_in_the_call_of_ray_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**settings: object) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(ray_connection.ray, "init", init)
    with pytest.raises(AssertionError, match="a bug"):
        ray_connection.connect(RayConfig())


def test_an_address_somebody_listens_at_is_left_to_ray() -> None:
    ray_connection._check_reachable(ray.get_runtime_context().gcs_address)
    ray_connection._check_reachable("auto")
    with socket.create_server(("", 0)) as server:
        ray_connection._check_reachable(f"localhost:{server.getsockname()[1]}")
