"""Supervision of workers: one that dies or hangs is noticed, reported, and brought back.

    supervisor = Supervisor(RestartPolicy())
    supervisor.watch(engines, lost=router.lost, restored=give_weights)
    await asyncio.wait({run, supervisor.failed}, return_when=asyncio.FIRST_COMPLETED)

The life of a watched worker, which a task of its own drives:

    well ── died, or silent for hang_s ──▶ lost ── back-off ──▶ restarting ──▶ restoring ──▶ well
                                            ▲                       │              │
                                            └── a failure, counted ─┴──────────────┘

The ranks of a group (`Cluster.is_group`) are watched as one worker: it is lost when any of them is, all of them are ended
at once and restarted together; `lost` is called with the rank that was lost, `restored` with rank 0.

A worker whose node is lost (`Cluster.lost_node`) is not restarted: it is retired, and the role goes on with the others.
With the last of them, or one of a role that is not restarted or is a group, the supervisor has failed.

What always holds:
- `retired` is called once for each worker that is never restarted because its node is lost: instead of `lost`, or after
  it if the node was lost during a restart.
- `lost` is called once each time a worker leaves `well`, before anything is done about it.
- `restored` is awaited only for a worker that has just been restarted, and only when it has returned the worker is well.
  Pings go on meanwhile: if the worker is lost again, it is cancelled. It may run for several workers at once.
- The wait before a restart is `backoff_s` after a worker's first failure within `window_s`, and twice the last after each
  further one, `backoff_most_s` at most: 0.5, 1, 2, 4, … 30 s.
- With more than `restarts` failures of a worker within `window_s`, or of a role if it has no more workers than that, else
  more than one a worker, the supervisor has failed: `failed` gets the error, and from then on nothing is reported or
  restarted.
- No wait is unbounded: a ping ends after `hang_s`, a restart by the executor's deadline, `restored` by the cluster's.
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
from roll.process.structured_gather import together

Lost = Callable[[int, str], None]
Restored = Callable[[int], Awaitable[None]]
T = TypeVar("T")
State = Literal["well", "lost", "restarting", "restoring", "gone"]

_log = logging.getLogger(__name__)

_END_S = 5.0
"""For a task that was cancelled to end."""


@dataclass(frozen=True)
class RestartPolicy:
    """When a worker counts as lost, and how often one is brought back."""

    ping_s: float = 1.0
    hang_s: float = 60.0
    restarts: int = 5
    """Failures within `window_s` that are mended, of one worker and of a small role; one more ends the run."""
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
    incarnation: int
    why: str
    """What was last wrong with it; empty if nothing was."""


class Supervisor:
    """Made inside a running event loop, by whose clock it measures."""

    def __init__(self, policy: RestartPolicy | None = None) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the error that ends the run; None when the supervisor is closed. Wait for it by `asyncio.wait`."""
        self._policy = policy or RestartPolicy()
        self._watches: dict[tuple[str, int], _Watch] = {}
        self._failures: dict[str, _Failures] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._endless: set[asyncio.Task[Any]] = set()
        """Those of the tasks that end with the supervisor."""

    def watch(
        self,
        cluster: Cluster[Any],
        lost: Lost,
        restored: Restored,
        restart: bool = True,
        retired: Lost = lambda rank, why: None,
    ) -> None:
        """Watches every worker of a role from now on, instead of what was watched of it before.

        `lost(rank, why)`: the first line of `why` says it all; the end of the worker's log may follow. Without `restart`
        nothing else is done about a lost worker, and it is not watched any more. `retired(rank, why)`: its node is lost.
        Once the supervisor has failed or is closed, this does nothing.
        """
        self.unwatch(cluster.role)
        if self.failed.done():
            return
        failures = self._failures.setdefault(cluster.role, _Failures(cluster.role, self._policy))
        failures.workers, failures.retired = len(cluster.units), 0
        for ranks in cluster.units:
            watch = _Watch(self, cluster, ranks, lost, restored if restart else None, retired, self._policy, failures)
            self._watches |= {(cluster.role, rank): watch for rank in ranks}
            watch.task = self.spawn(watch.run(self._policy.ping_s * ranks[0] / len(cluster)))

    def unwatch(self, role: str) -> None:
        """Leaves a role alone; a restart in progress is given up."""
        for key in [key for key in self._watches if key[0] == role]:
            self._watches.pop(key).task.cancel()

    def probe_now(self, role: str, rank: int) -> None:
        """Has a worker pinged at once; one that is not watched is ignored."""
        if (watch := self._watches.get((role, rank))) is not None:
            watch.suspected.set()

    def mark_unhealthy(self, role: str, rank: int, why: str) -> None:
        """Treats a worker as lost though it answers pings: whoever uses it says that it does not work."""
        if (watch := self._watches.get((role, rank))) is not None:
            watch.condemned = WorkerDied(f"{role}[{rank}]", (why or "it does not work").splitlines()[0])
            watch.suspected.set()

    def status(self) -> list[WorkerStatus]:
        """Of every worker, and of every group."""
        return [watch.status() for watch in dict.fromkeys(self._watches.values())]

    async def close(self) -> None:
        """Gives up everything in progress, and returns when it has ended. Safe to repeat, and inside a callback."""
        if not self.failed.done():
            self.failed.set_result(None)
        for role in {role for role, _ in self._watches}:
            self.unwatch(role)
        for task in self._endless:
            task.cancel()
        if self._tasks and asyncio.current_task() not in self._tasks:
            await asyncio.wait(self._tasks, timeout=_END_S)

    def spawn(self, work: Coroutine[Any, Any, T], endless: bool = False) -> asyncio.Task[T]:
        """A task that closing waits for. Closing cancels one that is `endless`; any other ends by itself, or is cancelled
        by who spawned it."""
        task = asyncio.get_running_loop().create_task(work)
        for tasks in (self._tasks, self._endless) if endless else (self._tasks,):
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        return task

    def fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
        elif not isinstance(error, ClusterLost):  # which everybody hears of
            _log.error("%s", error)  # the run ends with another one, and would say nothing of this
        for watch in self._watches.values():
            watch.task.cancel()


class _Failures:
    """A role's failures within the window, the oldest first."""

    def __init__(self, role: str, policy: RestartPolicy) -> None:
        self._role = role
        self.workers = 1
        self.retired = 0
        """Workers whose nodes are lost."""
        self._policy = policy
        self._recent: deque[tuple[float, str, str]] = deque()

    def count(self, worker: str, why: str) -> float:
        """Notes a failure; how long to wait before the restart. Raises when there have been too many."""
        now_s, policy, recent = _now_s(), self._policy, self._recent
        recent.append((now_s, worker, why))
        while recent[0][0] < now_s - policy.window_s:
            recent.popleft()
        own = sum(each == worker for _, each, _ in recent)
        most = max(policy.restarts, self.workers) if policy.restarts else 0
        if len(recent) > most or own > policy.restarts:
            role = len(recent) > most
            who, times, mended = ("it", len(recent), most) if role else (worker, own, policy.restarts)
            raise RunError(
                f"{worker} failed, and {self._role} is not brought back again: {who} has failed {times} times within "
                f"{policy.window_s:g} s, and {mended} are mended. The first cause: {recent[0][2]}"
            )
        return min(policy.backoff_s * 2.0 ** min(own - 1, 60), policy.backoff_most_s)


class _Watch:
    """One worker's life, or a group's, see the head of this file."""

    task: asyncio.Task[None]

    def __init__(
        self,
        owner: Supervisor,
        cluster: Cluster[Any],
        ranks: Sequence[int],
        lost: Lost,
        restored: Restored | None,
        retired: Lost,
        policy: RestartPolicy,
        failures: _Failures,
    ) -> None:
        self.suspected = asyncio.Event()
        self.condemned: RemoteError | None = None
        """Set while the worker is well, taken when it is noticed."""
        self._owner = owner
        self._cluster, self._ranks = cluster, ranks
        self._worker = cluster.role if cluster.is_group else cluster.places[ranks[0]].name
        self._lost, self._restored, self._retired = lost, restored, retired
        self._policy, self._failures = policy, failures
        self._state: State = "well"
        self._why = ""
        self._since_s = self._answered_s = _now_s()

    def status(self) -> WorkerStatus:
        now_s, incarnation = _now_s(), self._cluster.incarnation(self._ranks[0])
        return WorkerStatus(
            self._worker, self._state, now_s - self._since_s, now_s - self._answered_s, incarnation, self._why
        )

    async def run(self, delay_s: float) -> None:
        try:
            await self._pause(delay_s)
            pinging = self._owner.spawn(self._until_silent())
            while True:
                # waits: for as long as the worker answers
                error = await pinging
                rank = self._rank_of(error)
                if (node := await self._cluster.lost_node(rank)) is not None:
                    raise NodeLost(self._cluster.places[rank].name, node)
                self._wrong("gone" if self._restored is None else "lost", error)
                if self._cluster.is_group:
                    self._owner.spawn(self._cluster.end(rank, error))
                self._lost(rank, self._why)
                if self._restored is None:
                    await self._until_node_lost(rank)
                    return
                pinging = await self._bring_back(self._restored)
                self._enter("well")
                _log.info("%s is back, %d times restarted", self._worker, self._cluster.incarnation(self._ranks[0]))
        except NodeLost as error:
            self._retire(error)
        except Exception as error:
            self._owner.fail(error)

    async def _until_node_lost(self, rank: int) -> None:
        """A worker that is not restarted may have died with its node, which Ray finds out later: whoever goes on without
        the worker until then hears of it at once."""
        while (node := await self._cluster.lost_node(rank)) is None:  # noqa: ASYNC110
            await asyncio.sleep(self._policy.ping_s)
        raise NodeLost(self._cluster.places[rank].name, node)

    def _retire(self, error: NodeLost) -> None:
        """The worker is not restarted; the role goes on if it has others."""
        self._why = str(error)
        self._enter("gone")
        self._failures.retired += 1
        role = self._cluster.role
        if self._restored is not None and self._failures.retired < self._failures.workers:
            self._retired(self._ranks[0], self._why)
            return
        if self._cluster.is_group:
            self._owner.spawn(self._cluster.end(self._ranks[0], WorkerDied(self._worker, self._why)))
        self._owner.fail(without_role(role, error))

    async def _until_silent(self) -> RemoteError:
        """Pings the worker until it does not answer any more; what was heard instead."""
        while True:
            try:
                if len(self._ranks) == 1:
                    await self._ping(self._ranks[0])
                else:
                    await together(self._ping(rank) for rank in self._ranks)
            except RemoteError as error:
                return self._cluster.loss or error
            if (condemned := self.condemned) is not None:
                return condemned
            self._answered_s = _now_s()
            await self._pause(self._policy.ping_s)

    def _rank_of(self, error: RemoteError) -> int:
        """Which of the ranks an error is of."""
        names = [place.name for place in self._cluster.places]
        return names.index(error.worker) if error.worker in names else self._ranks[0]

    async def _ping(self, rank: int) -> None:
        """Two pings, if need be: the silence may have been that of this process, when something has kept it busy."""
        hang_s = self._policy.hang_s
        last_s = min(self._policy.ping_s, hang_s / 2)
        try:
            await self._cluster.ping(rank, hang_s - last_s)
        except CallTimedOut:
            try:
                await self._cluster.ping(rank, last_s)
            except CallTimedOut:
                raise CallTimedOut(self._cluster.places[rank].name, "a ping", hang_s) from None

    async def _pause(self, seconds: float) -> None:
        """Until the time has passed or somebody suspects the worker."""
        try:
            async with asyncio.timeout(seconds):
                await self.suspected.wait()
        except TimeoutError:
            pass
        self.suspected.clear()

    async def _bring_back(self, restored: Restored) -> asyncio.Task[RemoteError]:
        """Restarts and restores the worker until it is well; its pings go on."""
        while True:
            await asyncio.sleep(self._failures.count(self._worker, self._why))
            try:
                self._enter("restarting")
                await self._cluster.restart(self._ranks[0])
                self.condemned = None
                self._enter("restoring")
                return await self._restore(restored)
            except NodeLost:
                raise
            except RunError as error:
                self._wrong("lost", error)

    async def _restore(self, restored: Restored) -> asyncio.Task[RemoteError]:
        async def restore() -> None:
            # waits: who awaits this task has a limit
            await restored(self._ranks[0])

        restoring, pinging = self._owner.spawn(restore()), self._owner.spawn(self._until_silent())
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
            await _ended(restoring, pinging)
            raise

    def _wrong(self, state: State, error: RunError) -> None:
        self._why = str(error)
        self._enter(state)
        # What is not restarted fails the calls of whoever uses it, who says so.
        _log.log(logging.INFO if state == "gone" else logging.WARNING, "%s", self._why)

    def _enter(self, state: State) -> None:
        self._state, self._since_s = state, _now_s()


def without_role(role: str, lost: NodeLost) -> RunError:
    """That a run cannot go on: the nodes of a role's last workers are lost."""
    return RunError(
        f"{lost}, and no worker of {role} is left: start Ray on that node again or give {role} the devices of another "
        f"one, and continue from the last checkpoint with {option('resume')}"
    )


async def _ended(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks and waits until they have ended; what they then say is not asked for."""
    for task in tasks:
        task.cancel()
    done, _ = await asyncio.wait(tasks, timeout=_END_S)
    for task in done:
        if not task.cancelled():
            task.exception()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
