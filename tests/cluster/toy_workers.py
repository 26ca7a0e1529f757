"""Workers that die, hang and come back as a test says, on a clock that waits for nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Literal, TypeVar, cast

from roll.cluster import Cluster, RestartPolicy, Supervisor, WorkerPlacement
from roll.cluster.errors import CallTimedOut, ClusterLost, WorkerDied

T = TypeVar("T")


class VirtualClock(asyncio.SelectorEventLoop):
    """Time begins at 0, and passes only when everybody sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0

    def time(self) -> float:
        return self._now_s

    def _run_once(self) -> None:
        if not self._ready:  # type: ignore[attr-defined]
            timers = (timer.when() for timer in self._scheduled if not timer.cancelled())  # type: ignore[attr-defined]
            self._now_s = max(self._now_s, min(timers, default=self._now_s))
        super()._run_once()  # type: ignore[misc]


def run_virtually(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs it to its end, and sees that it leaves no task behind."""

    async def main() -> T:
        result = await asyncio.wait_for(work(), 1e6)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result

    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        return runner.run(main())


def now_s() -> float:
    return round(asyncio.get_running_loop().time(), 6)


class ToyHandle:
    """A worker that answers a ping after `answer_s`, as long as it is well."""

    in_process = False
    answer_s = 0.01

    def __init__(self, place: WorkerPlacement) -> None:
        self.placement = place
        self.restart_count = 0
        self.state: Literal["well", "dead", "hung"] = "well"
        self.deaf = 0
        """So many pings are not heard."""
        self.pings: list[float] = []
        self._changed = asyncio.Event()

    def become(self, state: Literal["well", "dead", "hung"]) -> None:
        self.state = state
        self._changed.set()
        self._changed = asyncio.Event()

    async def call(self, method: str, args: Any, kwargs: Any) -> Any:
        raise AssertionError("nobody calls")

    async def end(self, deadline_s: float) -> None:
        self.become("dead")

    async def ping(self, deadline_s: float) -> None:
        self.pings.append(now_s())
        heard, self.deaf = not self.deaf, max(self.deaf - 1, 0)
        try:
            async with asyncio.timeout(deadline_s):
                while self.state == "hung" or (self.state == "well" and not heard):
                    await self._changed.wait()
                await asyncio.sleep(self.answer_s if self.state == "well" else 0)
        except TimeoutError:
            raise CallTimedOut(self.placement.name, "ping", deadline_s) from None
        if self.state == "dead":
            raise WorkerDied(self.placement.name, f"killed, as number {self.restart_count}")


class ToyExecutor:
    """Restarts toys in `restart_s`; `errors` come instead, one each time."""

    deadline_s = 100.0
    restart_s = 2.0

    def __init__(self) -> None:
        self.restarts: list[tuple[float, str]] = []
        """When each restart began, and of whom."""
        self.errors: dict[str, list[Exception]] = {}
        self.lost_nodes: dict[str, str] = {}
        """What became of the node of each worker."""
        self.cluster_lost: ClusterLost | None = None

    async def lost_node(self, place: WorkerPlacement) -> str | None:
        if self.cluster_lost is not None:
            raise self.cluster_lost
        return self.lost_nodes.get(place.name)

    async def restart(self, handle: ToyHandle) -> None:
        self.restarts.append((now_s(), handle.placement.name))
        handle.become("dead")
        await asyncio.sleep(self.restart_s)
        if errors := self.errors.get(handle.placement.name):
            raise errors.pop(0)
        handle.restart_count += 1
        handle.become("well")


def toys(count: int, executor: ToyExecutor, role: str = "toy") -> tuple[Cluster[Any], list[ToyHandle]]:
    handles = [ToyHandle(WorkerPlacement(role, rank, count)) for rank in range(count)]
    return Cluster(role, handles, executor.deadline_s, cast(Any, executor)), handles


POLICY = RestartPolicy(ping_s=1, hang_s=20, restarts=5, window_s=300, backoff_s=0.5, backoff_most_s=3)
SOON_S = 1 + ToyHandle.answer_s
"""By then every worker has been pinged again."""


class Watched:
    """A role of toys under supervision, and all that was reported of it."""

    def __init__(
        self,
        count: int = 3,
        policy: RestartPolicy = POLICY,
        *,
        restart: bool = True,
        role: str = "toy",
        supervisor: Supervisor | None = None,
    ) -> None:
        self.executor = ToyExecutor()
        self.cluster, self.handles = toys(count, self.executor, role)
        self.supervisor = supervisor or Supervisor(policy)
        self.lost: list[tuple[float, int, str]] = []
        self.restored: list[tuple[float, int]] = []
        self.retired: list[tuple[int, str]] = []
        self.restore: Callable[[int], Awaitable[None]] | None = None
        """What restoring takes, if it takes anything."""
        self._restart = restart
        self.watch()

    def watch(self) -> None:
        retired = lambda rank, why: self.retired.append((rank, why))  # noqa: E731
        self.supervisor.watch(self.cluster, self._lost, self._restored, self._restart, retired)

    def _lost(self, rank: int, why: str) -> None:
        self.lost.append((now_s(), rank, why.splitlines()[0]))

    async def _restored(self, rank: int) -> None:
        self.restored.append((now_s(), rank))
        if self.restore is not None:
            await self.restore(rank)

    @property
    def states(self) -> list[str]:
        return [each.state for each in self.supervisor.status()]

    async def kill(self, rank: int, until_well_s: float = 10) -> None:
        """Kills a worker and waits until it is back."""
        self.handles[rank].become("dead")
        self.supervisor.probe_now(self.cluster.role, rank)
        await asyncio.sleep(until_well_s)

    async def error(self) -> Exception:
        await asyncio.wait({self.supervisor.failed}, timeout=1000)
        error = self.supervisor.failed.exception()
        assert isinstance(error, Exception)
        return error
