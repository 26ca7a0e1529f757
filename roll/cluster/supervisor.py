"""The supervisor: detects workers that die or hang, reports them, and restarts them.

    supervisor = Supervisor(RestartPolicy())
    supervisor.watch(engines, on_lost=router_lost, on_restored=send_weights)
    await asyncio.wait({run, supervisor.failed}, return_when=asyncio.FIRST_COMPLETED)

The life cycle of a watched worker, driven by one task per worker:

    well ── died, or silent for hang_s ──▶ lost ── back-off ──▶ restarting ──▶ restoring ──▶ well
                                            ▲                       │              │
                                            └── a failure, counted ─┴──────────────┘

The ranks of a group (`Cluster.is_group`) are watched as one worker: it is lost when any rank is; then all ranks are ended
at once and restarted together. `on_lost` is called with the rank that failed, `on_restored` with rank 0.

A worker whose node is lost (`Cluster.lost_node`) is not restarted: it is retired, and the role continues with the other
workers. The supervisor fails if the retired worker was the last one of its role, or if its role is not restarted or is a
group.

Invariants:
- `on_retired` is called once for each worker that is never restarted because its node is lost: instead of `on_lost`, or
  after it if the node was lost during a restart.
- `on_lost` is called once each time a worker leaves `well`, before the supervisor does anything else about it.
- `on_restored` is awaited only for a worker that has just been restarted; the worker is `well` once it has returned.
  Pings continue during `on_restored`: if the worker is lost again, `on_restored` is cancelled. It may run for several
  workers at once.
- The wait before a restart is `backoff_s` after a worker's first failure within `window_s` and doubles with each further
  one, up to `backoff_most_s`: 0.5, 1, 2, 4, … 30 s.
- A worker may fail `restarts` times within `window_s`, and a role max(`restarts`, number of its workers) times. After one
  failure more the supervisor fails: `failed` gets the error, and from then on nothing is reported or restarted.
- No wait is unbounded: a ping ends after `hang_s`, a restart after the executor's deadline, `on_restored` after the
  cluster's.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from roll.cluster.cluster import Cluster
from roll.cluster.errors import CallTimedOut, ClusterLost, NodeLost, RemoteError, WorkerDied
from roll.config.errors import RunError
from roll.config.hints import option
from roll.process.structured_gather import structured_gather

OnLost = Callable[[int, str], None]
OnRestored = Callable[[int], Awaitable[None]]
T = TypeVar("T")
State = Literal["well", "lost", "restarting", "restoring", "gone"]

_log = logging.getLogger(__name__)

_END_S = 5.0
"""How long to wait for a cancelled task to end."""


@dataclass(frozen=True)
class RestartPolicy:
    """When a worker counts as lost, and how often it is restarted."""

    ping_s: float = 1.0
    hang_s: float = 60.0
    restarts: int = 5
    """Restarts allowed within `window_s` per worker, and per role (a role with more workers is allowed one restart per
    worker); one more failure ends the run. 0 allows none."""
    window_s: float = 600.0
    backoff_s: float = 0.5
    backoff_most_s: float = 30.0


@dataclass(frozen=True)
class WorkerStatus:
    worker: str
    state: State
    """`gone` is a lost worker that is not restarted."""
    since_s: float
    """Seconds it has been in this state."""
    silent_s: float
    """Seconds since it last answered."""
    restart_count: int
    why: str
    """Its last error; empty if there was none."""


class Supervisor:
    """Must be created inside a running event loop, whose clock it uses."""

    def __init__(self, policy: RestartPolicy | None = None) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the error that ends the run, or None when the supervisor is closed. Wait for it with `asyncio.wait`."""
        self._policy = policy or RestartPolicy()
        self._watches: dict[tuple[str, int], _Watch] = {}
        self._failures: dict[str, _Failures] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._endless: set[asyncio.Task[Any]] = set()
        """Those of `_tasks` that `close` cancels."""

    def watch(
        self,
        cluster: Cluster[Any],
        on_lost: OnLost,
        on_restored: OnRestored,
        restart: bool = True,
        on_retired: OnLost = lambda rank, why: None,
    ) -> None:
        """Watches every worker of a role, replacing an earlier watch of the role.

        `lost(rank, why)`: the first line of `why` is the reason; the end of the worker's log may follow. Without
        `restart`, a lost worker is reported but not restarted or pinged again. `retired(rank, why)`: its node is lost.
        Has no effect once the supervisor has failed or is closed.
        """
        self.unwatch(cluster.role)
        if self.failed.done():
            return
        failures = self._failures.setdefault(cluster.role, _Failures(cluster.role, self._policy))
        failures.workers, failures.retired = len(cluster.restart_units), 0
        for ranks in cluster.restart_units:
            watch = _Watch(
                self, cluster, ranks, on_lost, on_restored if restart else None, on_retired, self._policy, failures
            )
            self._watches |= {(cluster.role, rank): watch for rank in ranks}
            watch.task = self.spawn(watch.run(self._policy.ping_s * ranks[0] / len(cluster)))

    def unwatch(self, role: str) -> None:
        """Stops watching a role and cancels its restarts in progress."""
        for key in [key for key in self._watches if key[0] == role]:
            self._watches.pop(key).task.cancel()

    def probe_now(self, role: str, rank: int) -> None:
        """Pings a worker at once; has no effect on a worker that is not watched."""
        if (watch := self._watches.get((role, rank))) is not None:
            watch.probe_requested.set()

    def mark_unhealthy(self, role: str, rank: int, why: str) -> None:
        """Treats a worker as lost although it answers pings, because its users found that it does not work."""
        if (watch := self._watches.get((role, rank))) is not None:
            watch.unhealthy_error = WorkerDied(f"{role}[{rank}]", (why or "it does not work").splitlines()[0])
            watch.probe_requested.set()

    def status(self) -> list[WorkerStatus]:
        """One status per worker, and one per group."""
        return [watch.status() for watch in dict.fromkeys(self._watches.values())]

    async def close(self) -> None:
        """Cancels all watches and restarts, and waits until they have ended. Idempotent; may be called in a callback."""
        if not self.failed.done():
            self.failed.set_result(None)
        for role in {role for role, _ in self._watches}:
            self.unwatch(role)
        for task in self._endless:
            task.cancel()
        if self._tasks and asyncio.current_task() not in self._tasks:
            await asyncio.wait(self._tasks, timeout=_END_S)

    def spawn(self, work: Coroutine[Any, Any, T], endless: bool = False) -> asyncio.Task[T]:
        """Starts a task that `close` waits for. `close` cancels `endless` tasks; other tasks end by themselves or are
        cancelled by their creator."""
        task = asyncio.get_running_loop().create_task(work)
        for tasks in (self._tasks, self._endless) if endless else (self._tasks,):
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        return task

    def fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
        elif not isinstance(error, ClusterLost):  # every caller gets a `ClusterLost` anyway
            _log.error("%s", error)  # the run ends with an earlier error and would not report this one
        for watch in self._watches.values():
            watch.task.cancel()


class _Failures:
    """A role's failures within the window, oldest first."""

    def __init__(self, role: str, policy: RestartPolicy) -> None:
        self._role = role
        self.workers = 1
        self.retired = 0
        """Number of workers whose nodes are lost."""
        self._policy = policy
        self._recent: deque[tuple[float, str, str]] = deque()

    def count(self, worker: str, why: str) -> float:
        """Counts a failure and returns the back-off before the restart. Raises `RunError` after too many failures."""
        now_s, policy, recent = _now_s(), self._policy, self._recent
        recent.append((now_s, worker, why))
        while recent[0][0] < now_s - policy.window_s:
            recent.popleft()
        by_worker = sum(each == worker for _, each, _ in recent)
        most = max(policy.restarts, self.workers) if policy.restarts else 0
        if len(recent) > most or by_worker > policy.restarts:
            role = len(recent) > most
            who, times, allowed = ("it", len(recent), most) if role else (worker, by_worker, policy.restarts)
            raise RunError(
                f"{worker} failed, and {self._role} is not restarted again: {who} has failed {times} times within "
                f"{policy.window_s:g} s, and {allowed} restarts are allowed. The first cause: {recent[0][2]}"
            )
        return min(policy.backoff_s * 2.0 ** min(by_worker - 1, 60), policy.backoff_most_s)


class _Watch:
    """Watches one worker or one group; see the life cycle in the module's docstring."""

    task: asyncio.Task[None]

    def __init__(
        self,
        supervisor: Supervisor,
        cluster: Cluster[Any],
        ranks: Sequence[int],
        on_lost: OnLost,
        on_restored: OnRestored | None,
        on_retired: OnLost,
        policy: RestartPolicy,
        failures: _Failures,
    ) -> None:
        self.probe_requested = asyncio.Event()
        self.unhealthy_error: RemoteError | None = None
        """The error of `mark_unhealthy`; reset after the restart."""
        self._supervisor = supervisor
        self._cluster, self._ranks = cluster, ranks
        self._worker = cluster.role if cluster.is_group else cluster.placements[ranks[0]].name
        self._on_lost, self._on_restored, self._on_retired = on_lost, on_restored, on_retired
        self._policy, self._failures = policy, failures
        self._state: State = "well"
        self._why = ""
        self._since_s = self._answered_s = _now_s()

    def status(self) -> WorkerStatus:
        now_s, restart_count = _now_s(), self._cluster.restart_count(self._ranks[0])
        return WorkerStatus(
            self._worker, self._state, now_s - self._since_s, now_s - self._answered_s, restart_count, self._why
        )

    async def run(self, delay_s: float) -> None:
        try:
            await self._sleep_until_probe(delay_s)
            pinging = self._supervisor.spawn(self._until_silent())
            while True:
                # waits: for as long as the worker answers
                error = await pinging
                rank = self._rank_of(error)
                if (node := await self._cluster.lost_node(rank)) is not None:
                    raise NodeLost(self._cluster.placements[rank].name, node)
                self._record_failure("gone" if self._on_restored is None else "lost", error)
                if self._cluster.is_group:
                    self._supervisor.spawn(self._cluster.end(rank, error))
                self._on_lost(rank, self._why)
                if self._on_restored is None:
                    await self._until_node_lost(rank)
                    return
                pinging = await self._restart_until_well(self._on_restored)
                self._enter("well")
                _log.info("%s is back, %d times restarted", self._worker, self._cluster.restart_count(self._ranks[0]))
        except NodeLost as error:
            self._retire(error)
        except Exception as error:
            self._supervisor.fail(error)

    async def _until_node_lost(self, rank: int) -> None:
        """Waits until the node of a worker that is not restarted is lost, then raises `NodeLost`: the worker may have
        died with its node, which Ray detects later."""
        while (node := await self._cluster.lost_node(rank)) is None:  # noqa: ASYNC110
            await asyncio.sleep(self._policy.ping_s)
        raise NodeLost(self._cluster.placements[rank].name, node)

    def _retire(self, error: NodeLost) -> None:
        """Retires the worker; the role continues if it has other workers, else the supervisor fails."""
        self._why = str(error)
        self._enter("gone")
        self._failures.retired += 1
        role = self._cluster.role
        if self._on_restored is not None and self._failures.retired < self._failures.workers:
            self._on_retired(self._ranks[0], self._why)
            return
        if self._cluster.is_group:
            self._supervisor.spawn(self._cluster.end(self._ranks[0], WorkerDied(self._worker, self._why)))
        self._supervisor.fail(role_lost_error(role, error))

    async def _until_silent(self) -> RemoteError:
        """Pings the worker until a ping fails or `mark_unhealthy` is called; returns that error."""
        while True:
            try:
                if len(self._ranks) == 1:
                    await self._ping(self._ranks[0])
                else:
                    await structured_gather(self._ping(rank) for rank in self._ranks)
            except RemoteError as error:
                return self._cluster.group_failure or error
            if (unhealthy_error := self.unhealthy_error) is not None:
                return unhealthy_error
            self._answered_s = _now_s()
            await self._sleep_until_probe(self._policy.ping_s)

    def _rank_of(self, error: RemoteError) -> int:
        """The rank that an error names; the first rank if it names none."""
        names = [placement.name for placement in self._cluster.placements]
        return names.index(error.worker) if error.worker in names else self._ranks[0]

    async def _ping(self, rank: int) -> None:
        """Pings a second time after a timeout: this process itself may have been blocked during the first ping."""
        hang_s = self._policy.hang_s
        last_s = min(self._policy.ping_s, hang_s / 2)
        try:
            await self._cluster.ping(rank, hang_s - last_s)
        except CallTimedOut:
            try:
                await self._cluster.ping(rank, last_s)
            except CallTimedOut:
                raise CallTimedOut(self._cluster.placements[rank].name, "a ping", hang_s) from None

    async def _sleep_until_probe(self, seconds: float) -> None:
        """Sleeps, but returns early on `probe_now` or `mark_unhealthy`."""
        try:
            async with asyncio.timeout(seconds):
                await self.probe_requested.wait()
        except TimeoutError:
            pass
        self.probe_requested.clear()

    async def _restart_until_well(self, on_restored: OnRestored) -> asyncio.Task[RemoteError]:
        """Restarts and restores the worker, retrying until it is well; returns the task that continues to ping it."""
        while True:
            await asyncio.sleep(self._failures.count(self._worker, self._why))
            try:
                self._enter("restarting")
                await self._cluster.restart(self._ranks[0])
                self.unhealthy_error = None
                self._enter("restoring")
                return await self._restore(on_restored)
            except NodeLost:
                raise
            except RunError as error:
                self._record_failure("lost", error)

    async def _restore(self, on_restored: OnRestored) -> asyncio.Task[RemoteError]:
        async def restore() -> None:
            # waits: the code that awaits this task has a deadline
            await on_restored(self._ranks[0])

        restoring, pinging = self._supervisor.spawn(restore()), self._supervisor.spawn(self._until_silent())
        deadline_s = self._cluster.deadline_s
        try:
            await asyncio.wait({restoring, pinging}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if restoring.cancelled():
                raise RunError(f"{self._worker} could not be restored: that was cancelled")
            if restoring.done():
                restoring.result()
                return pinging
            raise pinging.result() if pinging.done() else CallTimedOut(self._worker, "its restoration", deadline_s)
        except BaseException:
            await _cancel_all(restoring, pinging)
            raise

    def _record_failure(self, state: State, error: RunError) -> None:
        self._why = str(error)
        self._enter(state)
        # A worker that is not restarted makes its callers' calls fail, and they report it.
        _log.log(logging.INFO if state == "gone" else logging.WARNING, "%s", self._why)

    def _enter(self, state: State) -> None:
        self._state, self._since_s = state, _now_s()


def role_lost_error(role: str, on_lost: NodeLost) -> RunError:
    """The error of a run that cannot continue because the nodes of all workers of a role are lost."""
    return RunError(
        f"{on_lost}, and no worker of {role} is left: start Ray on that node again or give {role} the devices of another "
        f"one, and continue from the last checkpoint with {option('resume')}"
    )


async def _cancel_all(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks and waits until they have ended; ignores their errors."""
    for task in tasks:
        task.cancel()
    done, _ = await asyncio.wait(tasks, timeout=_END_S)
    for task in done:
        if not task.cancelled():
            task.exception()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
