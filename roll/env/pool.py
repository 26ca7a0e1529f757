"""Environment processes and the episodes in them.

Every call ends: with the environment's result, with an `EnvFailure` of its own, or, if the pool was closed or processes
no longer start, with a `RunError`. Everything that a call waits for takes bounded time: a free slot in a process
(`admission_s`), the import of the environment's code (`start_s`), the environment itself (`reset_s`, `step_s`).

An episode is open from `reset` until its last step, a call that fails or is cancelled, or `close_episode`, whichever
comes first. The pool then closes its environment in the background; the episode keeps its slot until that is done.

    two slots in one process; episodes A and B are open, C waits for a slot
    A's step hangs: after step_s A fails with "deadline" and the process is killed; B's next call fails with "lost";
    C begins in the replacement process, and so may A and B if they are reset
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from roll.config.errors import RunError, UserError
from roll.data.task import EnvSpec
from roll.env import ipc
from roll.env.admission import AdmissionQueue
from roll.env.base import EnvFailure, ResetResult, Step
from roll.env.env_process import EnvProcess, Reply
from roll.env.resolve import portable_spec
from roll.env.stats import EnvStats
from roll.process.bounded_log import LIMIT_BYTES
from roll.process.pool import ProcessPool
from roll.sandbox.cgroups import sweep

_log = logging.getLogger(__name__)

_CLOSE_S = 5.0

R = TypeVar("R")


@dataclass(frozen=True)
class Deadlines:
    """Time limits in seconds."""

    start_s: float = 60.0
    """Starting a process; importing an environment's code in it."""
    reset_s: float = 60.0
    """Creating an environment and beginning its episode."""
    step_s: float = 30.0
    """One step; closing an environment."""
    admission_s: float = 600.0
    """Waiting for a free slot while all slots are in use."""


@dataclass(eq=False)
class _Episode:
    id: str
    kind: str
    """The name of its environment."""
    handle: int
    """Handle of its environment in the process: an episode id may be reused while its last environment is being
    closed."""
    busy: bool = False
    slot_process: EnvProcess | None = None
    """The process in which it holds a slot."""
    own_process: EnvProcess | None = None
    """A process of its own, if it runs alone."""
    call: asyncio.Future[Reply] | None = None
    """The last call that was sent to the process."""
    admitted: asyncio.Future[None] | None = None
    """Done when it no longer waits for a slot."""

    @property
    def queue_position(self) -> int:
        """Handles are numbered in the order in which episodes arrive."""
        return self.handle

    @property
    def process(self) -> EnvProcess | None:
        """The process in which it runs."""
        return self.own_process or self.slot_process


class EnvPool:
    """Runs episodes in `workers` processes with up to `per_process` environments each.

    A new episode goes to the process with the fewest. It waits, first in, first out, while all are full or the number of
    open episodes of its environment has reached the limit in `limits`. `memory_mb` limits the memory that the
    environments of one process take together (0: no limit). The environments' output goes to the file `log`, of at most
    `log_bytes`, or to standard error. The processes end with the thread that runs the event loop, even if it is killed.
    """

    def __init__(
        self,
        workers: int = 1,
        per_process: int = 64,
        deadlines: Deadlines = Deadlines(),  # noqa: B008 (frozen)
        memory_mb: int = 0,
        log: Path | None = None,
        limits: Mapping[str, int] | None = None,
        root: str = "",
        log_bytes: int = LIMIT_BYTES,
    ) -> None:
        self._workers = workers
        self._per_process = per_process
        self._deadlines = deadlines
        self._memory_mb = memory_mb
        self._log = log
        self._log_bytes = log_bytes
        self._root = root or os.getcwd()
        self._pool = ProcessPool("environment", workers, self._start_process, self._add_slots, self._on_end)
        self._slots: dict[EnvProcess, set[_Episode]] = {}
        self._episodes: dict[str, _Episode] = {}
        self._handles = itertools.count()
        self._queue: AdmissionQueue[_Episode] = AdmissionQueue(limits or {})
        self._closures: dict[asyncio.Task[None], _Episode] = {}
        self._counts: Counter[str] = Counter()
        self._seconds = {"reset": 0.0, "step": 0.0}
        self._stats_taken = EnvStats()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def processes(self) -> frozenset[EnvProcess]:
        return self._pool.processes

    @property
    def replacements(self) -> frozenset[asyncio.Task[None]]:
        """The replacements of processes in progress."""
        return self._pool.replacements

    async def start(self) -> None:
        """Starts all processes; raises `RunError` if one does not start."""
        await self._pool.start()

    async def reset(self, episode_id: str, spec: EnvSpec, alone: bool = False) -> ResetResult:
        """Begins an episode. With `alone` it gets a process of its own, so that no other episode can cause its failures.
        An open episode with the same id is closed first."""
        self._pool.raise_if_ended()
        await self.close_episode(episode_id)
        episode = self._episodes[episode_id] = _Episode(episode_id, spec.name, next(self._handles))
        result = await self._end_on_failure(episode, self._open(episode, spec, alone))
        assert isinstance(result, ResetResult)
        return result

    async def step(self, episode_id: str, action: str) -> Step:
        """Acts in an open episode. An episode takes one call at a time."""
        self._pool.raise_if_ended()
        episode = self._episodes.get(episode_id)
        if episode is None:
            raise self._count_failure(EnvFailure("lost", f"episode {episode_id!r} is not open here"))
        if episode.busy:
            raise self._count_failure(
                EnvFailure("invalid", f"episode {episode_id!r} already has a call in flight: make one at a time")
            )
        act = self._ask(episode, ipc.EnvAct(episode.handle, action), self._deadlines.step_s, "step")
        step = await self._end_on_failure(episode, act)
        assert isinstance(step, Step)
        if step.done:
            self._counts["finished"] += 1
            self._release(episode)
        return step

    async def close_episode(self, episode_id: str) -> None:
        """Ends an episode if it is open: its environment is closed in the background, and its in-flight call fails with
        `lost`."""
        episode = self._episodes.get(episode_id)
        if episode is not None:
            self._release(episode)

    def stats(self) -> EnvStats:
        """Counts since the pool was created."""
        return EnvStats(
            **self._counts,
            restarts=self._pool.restarts,
            reset_s=self._seconds["reset"],
            step_s=self._seconds["step"],
            open=len(self._episodes),
            waiting=sum(episode.admitted is not None and not episode.admitted.done() for episode in self._queue),
        )

    def take_stats(self) -> EnvStats:
        """Counts since the last call."""
        now = self.stats()
        since, self._stats_taken = now.since(self._stats_taken), now
        return since

    async def close(self) -> None:
        """Closes the environments that have no in-flight call, which may take up to 5 seconds, then ends all processes
        and waits for them. In-flight and waiting calls get a `RunError`. May be called again."""
        self._pool.end()
        for episode in list(self._episodes.values()):
            self._release(episode)
        idle = [task for task, episode in self._closures.items() if episode.call is None or episode.call.done()]
        if idle:
            await asyncio.wait(idle, timeout=min(self._deadlines.step_s, _CLOSE_S))
        closures = list(self._closures)
        for task in closures:
            task.cancel()
        # waits: they were cancelled
        await asyncio.gather(*closures, return_exceptions=True)
        await self._pool.close()
        sweep()

    async def _open(self, episode: _Episode, spec: EnvSpec, alone: bool) -> ipc.Result:
        spec = _make_portable(spec)
        options = _pack(spec)
        process = await self._acquire_slot(episode)
        if alone:
            process = episode.own_process = await self._pool.launch(lambda: self._start_env_process(_ignore))
        await process.load(spec.name, spec.code, self._deadlines.start_s)
        self._raise_if_closed(episode)  # an environment created now would never be closed
        request = ipc.EnvReset(episode.handle, spec.name, spec.seed, options)
        return await self._ask(episode, request, self._deadlines.reset_s, "reset")

    async def _ask(self, episode: _Episode, request: ipc.EnvCall, deadline_s: float, what: str) -> ipc.Result:
        assert episode.process is not None
        episode.call = episode.process.ask(request, deadline_s, f"{what} of episode {episode.id!r}")
        # waits: the call has a deadline
        result, seconds = await asyncio.shield(episode.call)
        if isinstance(result, ipc.EnvFailed):
            raise EnvFailure(result.kind, result.reason, result.detail)
        self._counts[f"{what}s"] += 1
        self._seconds[what] += seconds
        return result

    async def _end_on_failure(self, episode: _Episode, call: Coroutine[Any, Any, R]) -> R:
        """The call's result; if the call fails, ends the episode."""
        episode.busy = True
        try:
            # waits: the call has a deadline
            result = await call
            self._raise_if_closed(episode)
        except EnvFailure as failure:
            self._release(episode)
            self._pool.raise_if_ended()
            raise self._count_failure(failure) from None
        except BaseException:
            self._release(episode)
            raise
        finally:
            episode.busy = False
        return result

    def _raise_if_closed(self, episode: _Episode) -> None:
        if self._episodes.get(episode.id) is not episode:
            raise EnvFailure("lost", f"episode {episode.id!r} was closed meanwhile")

    def _release(self, episode: _Episode) -> None:
        """Removes an episode from the pool's table and, in the background, from its process. May be called again."""
        if self._episodes.get(episode.id) is not episode:
            return
        del self._episodes[episode.id]
        if episode.admitted is not None and not episode.admitted.done():
            episode.admitted.set_exception(
                EnvFailure("lost", f"episode {episode.id!r} was closed while it waited for a slot")
            )
        if episode.slot_process is not None:
            task = asyncio.create_task(self._close_in_background(episode, episode.slot_process))
            self._closures[task] = episode
            task.add_done_callback(self._closures.pop)

    async def _close_in_background(self, episode: _Episode, process: EnvProcess) -> None:
        if episode.call is not None:
            # waits: the call has a deadline
            await asyncio.wait({episode.call})
            await self._close_environment(episode, episode.process or process)
        if episode.own_process is not None:
            await self._pool.retire(episode.own_process)
        self._free_slot(episode, process)

    async def _close_environment(self, episode: _Episode, process: EnvProcess) -> None:
        if not process.usable:
            return
        close = process.ask(ipc.EnvClose(episode.handle), self._deadlines.step_s, f"close of episode {episode.id!r}")
        try:
            result, _ = await close
        except EnvFailure as failure:
            if failure.kind != "lost":
                _log.warning("the environment of episode %r was not closed: %s", episode.id, failure)
            return
        if isinstance(result, ipc.EnvFailed):
            _log.warning("closing the environment of episode %r failed: %s\n%s", episode.id, result.reason, result.detail)

    async def _acquire_slot(self, episode: _Episode) -> EnvProcess:
        """The process in which the episode gets a slot; waits if all are full."""
        self._queue.add(episode)
        episode.admitted = asyncio.get_running_loop().create_future()
        self._assign_slots()
        if not episode.admitted.done():
            try:
                await asyncio.wait({episode.admitted}, timeout=self._deadlines.admission_s)
            finally:
                episode.admitted.cancel()
        if episode.admitted.cancelled():
            raise EnvFailure(
                "lost", f"no slot became free within {self._deadlines.admission_s:g} s: {self._full_reason(episode.kind)}"
            )
        episode.admitted.result()
        assert episode.slot_process is not None
        return episode.slot_process

    def _assign_slots(self) -> None:
        """Gives free slots to the episodes that have waited longest."""
        while (episode := self._queue.first()) is not None and (process := self._least_loaded()) is not None:
            assert episode.admitted is not None
            self._queue.admit(episode)
            self._slots[process].add(episode)
            episode.slot_process = process
            episode.admitted.set_result(None)

    def _full_reason(self, kind: str) -> str:
        limit, slots = self._queue.limit(kind), self._workers * self._per_process
        if limit is not None and limit < slots:
            return f"all {limit} slots for {kind!r} are in use"
        return f"all {slots} slots are in use"

    def _least_loaded(self) -> EnvProcess | None:
        usable = [
            process for process, episodes in self._slots.items() if process.usable and len(episodes) < self._per_process
        ]
        return min(usable, key=lambda process: len(self._slots[process]), default=None)

    def _free_slot(self, episode: _Episode, process: EnvProcess) -> None:
        if process in self._slots:
            self._slots[process].remove(episode)
            self._queue.release(episode)
            self._assign_slots()

    def _process_ended(self, process: EnvProcess) -> None:
        """An environment process ended: starts a replacement in the background."""
        for episode in self._slots.pop(process, ()):
            self._queue.release(episode)
        self._pool.replace(process)

    async def _start_process(self) -> EnvProcess:
        return await self._start_env_process(self._process_ended)

    async def _start_env_process(self, on_end: Callable[[EnvProcess], None]) -> EnvProcess:
        return await EnvProcess.start(
            root=self._root,
            memory_mb=self._memory_mb,
            deadline_s=self._deadlines.start_s,
            log=self._log,
            log_bytes=self._log_bytes,
            on_end=on_end,
        )

    def _add_slots(self, process: EnvProcess) -> None:
        self._slots[process] = set()
        self._assign_slots()

    def _on_end(self, error: RunError) -> None:
        """Makes every waiting call fail with the error."""
        for episode in self._queue.clear():
            if episode.admitted is not None and not episode.admitted.done():
                episode.admitted.set_exception(RunError(str(error)))

    def _count_failure(self, failure: EnvFailure) -> EnvFailure:
        self._counts[failure.kind] += 1
        return failure


def _ignore(process: EnvProcess) -> None:
    """A process of one episode ended: the episode's call fails, and no other is affected."""


def _make_portable(spec: EnvSpec) -> EnvSpec:
    try:
        return portable_spec(spec)
    except UserError as error:
        raise EnvFailure("invalid", str(error)) from error


def _pack(spec: EnvSpec) -> bytes:
    """The options as bytes. Types of `__main__` are pickled by value, because an option may be of any type."""
    import cloudpickle

    try:
        options: bytes = cloudpickle.dumps(dict(spec.options))
    except Exception as error:
        reason = f"options of environment {spec.name!r} cannot be sent to a process: {type(error).__name__}: {error}"
        raise EnvFailure("invalid", reason) from error
    return options
