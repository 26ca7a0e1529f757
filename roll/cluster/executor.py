"""Executors: where workers run and how a call reaches one of them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol, TypeVar

from roll.cluster.errors import ClusterLost
from roll.cluster.process_handle import ProcessHandle
from roll.cluster.worker import Worker, WorkerPlacement
from roll.config.errors import RunError
from roll.data.batch import Batch
from roll.process.bounded_log import LIMIT_BYTES
from roll.process.structured_gather import structured_gather

W = TypeVar("W", bound=Worker)

_CLOSE_S = 10.0
"""Deadline for workers in separate processes to close; then the executor kills them."""


class Handle(Protocol):
    """A reference to one worker, in this process or another."""

    @property
    def placement(self) -> WorkerPlacement: ...

    @property
    def in_process(self) -> bool:
        """Whether the worker runs in this process, so that its results may share memory with it."""
        ...

    @property
    def restart_count(self) -> int:
        """How often the worker has been restarted."""
        ...

    async def call(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Calls the worker's method of that name. An exception of the method is raised here."""
        ...

    async def stream(
        self, method: str, report: Callable[[Any], None], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Calls a method that reports while it runs and gets `report` as its first argument. Reports come in order and
        before the result. Cancelling this coroutine ends the call on the worker."""
        ...

    async def end(self, deadline_s: float) -> None:
        """Kills the worker's process; returns once it has ended."""
        ...

    async def ping(self, deadline_s: float) -> None:
        """Returns once the worker's process has answered; it answers also while a method is running.

        Raises `WorkerDied` or `CallTimedOut`.
        """
        ...


class Executor(Protocol):
    @property
    def deadline_s(self) -> float:
        """Deadline of a call on a worker in seconds."""
        ...

    @property
    def controller_bytes(self) -> int:
        """Bytes of calls and results that went through this process."""
        ...

    def start_connecting(self) -> None:
        """Begins to connect in a thread, if that takes long; `connect` waits for it. Whoever calls this disconnects."""
        ...

    def connect(self) -> None:
        """Connects to the cluster, if there is one, so that workers can be started."""
        ...

    def write_logs_to(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        """Sets the folder for the logs of workers in separate processes: one log of at most `limit_bytes` per worker."""
        ...

    def reserve(self, placements: Sequence[WorkerPlacement], spares: Sequence[WorkerPlacement] = ()) -> None:
        """Reserves the devices of all workers of a run; those in `spares` may also have a spare process."""
        ...

    @property
    def failure(self) -> ClusterLost | None:
        """Why no worker can be reached; None while the cluster is alive."""
        ...

    async def lost_node(self, placement: WorkerPlacement) -> str | None:
        """Names the lost node of a placement and why it is lost; None while the node is alive. Raises `ClusterLost`."""
        ...

    def disconnect(self) -> None:
        """Stops everything that the executor itself started. Idempotent."""
        ...

    async def fetch(self, batch: Batch) -> Batch:
        """Returns the batch with all of its tokens in this process."""
        ...

    async def start(self, make: Callable[[WorkerPlacement], W], placements: Sequence[WorkerPlacement]) -> list[Handle]:
        """Starts one worker per placement; `make` creates it there."""
        ...

    async def keep_spare(self, handle: Handle, warm: Callable[[], None]) -> None:
        """Keeps a spare process ready, warmed up by `warm`, in which the worker restarts faster. Only for placements that
        were reserved with a spare, and for workers in a separate process."""
        ...

    async def restart(self, handle: Handle) -> None:
        """Ends a worker and starts a new one with the same placement and the same `make`; the handle then refers to it.

        In-flight calls fail with `WorkerDied`, as do calls until the new worker has started. Copies of the handle in
        other processes still refer to the old worker: send the handle again. A failed restart may be retried.
        """
        ...

    async def close(self) -> None:
        """Closes every worker, the newest first, even if some of them raise."""
        ...


class LocalHandle:
    in_process = True

    def __init__(self, worker: Worker) -> None:
        self.placement = worker.placement
        self.restart_count = 0
        self._worker = worker

    async def call(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        result = getattr(self._worker, method)(*args, **kwargs)
        # waits: `Cluster` bounds every call
        return await result if inspect.isawaitable(result) else result

    def stream(
        self, method: str, report: Callable[[Any], None], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Coroutine[Any, Any, Any]:
        call: Coroutine[Any, Any, Any] = getattr(self._worker, method)(report, *args, **kwargs)
        return call

    async def end(self, deadline_s: float) -> None:
        """Does nothing: the worker ends with this process."""

    async def ping(self, deadline_s: float) -> None:
        """Returns at once: a worker in this process is alive."""

    async def restart(self, make: Callable[[WorkerPlacement], Worker]) -> Worker:
        """Closes the worker, creates a new one with the same placement and returns it."""
        old = self.__dict__.pop("_worker")  # two of them may not fit into memory
        await old.close()
        del old
        self._worker = make(self.placement)
        self.restart_count += 1
        return self._worker


class LocalExecutor:
    """Runs every worker in this process: a call is a plain method call, roles run one after another, nothing is pickled,
    and a debugger works. Only the ranks of a mesh have a process each, because they compute at the same time."""

    def __init__(self, deadline_s: float = 1800.0, start_deadline_s: float = 300.0, silent_s: float = 60.0) -> None:
        """`start_deadline_s`: seconds that workers in separate processes may take to start. The start fails if such a
        worker answers no ping for `silent_s`."""
        self.deadline_s = deadline_s
        self._start_s = start_deadline_s
        self._silent_s = silent_s
        self._workers: list[Worker] = []
        self._makes: dict[LocalHandle, Callable[[WorkerPlacement], Worker]] = {}
        """The function that creates each worker of this process."""
        self._processes: list[ProcessHandle] = []
        self._spare_placements: set[WorkerPlacement] = set()
        self._log_dir: Path | None = None
        self._log_bytes = LIMIT_BYTES

    @property
    def controller_bytes(self) -> int:
        return sum(handle.bytes for handle in self._processes)

    def start_connecting(self) -> None:
        """Does nothing: workers run in this process."""

    def connect(self) -> None:
        """Does nothing: workers run in this process."""

    def write_logs_to(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        """Sets the folder for the logs of workers in separate processes; those in this process print to its streams."""
        self._log_dir, self._log_bytes = folder, limit_bytes

    def reserve(self, placements: Sequence[WorkerPlacement], spares: Sequence[WorkerPlacement] = ()) -> None:
        """Reserves nothing: this process already has its devices."""
        self._spare_placements = set(spares)

    @property
    def failure(self) -> ClusterLost | None:
        """Always None: workers of this machine can be reached."""
        return None

    async def lost_node(self, placement: WorkerPlacement) -> str | None:
        """Always None: the workers are on this machine."""
        return None

    def disconnect(self) -> None:
        """Does nothing: there is no connection to close."""

    async def fetch(self, batch: Batch) -> Batch:
        return batch

    async def start(self, make: Callable[[WorkerPlacement], W], placements: Sequence[WorkerPlacement]) -> list[Handle]:
        handles: list[Handle] = []
        processes: list[ProcessHandle] = []
        for placement in placements:
            if placement.mesh is not None:
                processes.append(ProcessHandle(placement, make, self._log_of(placement), self._log_bytes))
                handles.append(processes[-1])
                continue
            worker = make(placement)
            self._workers.append(worker)
            handle = LocalHandle(worker)
            self._makes[handle] = make
            handles.append(handle)
        self._processes += processes
        if processes:
            starts = structured_gather(handle.start(self._silent_s) for handle in processes)
            await self._in_time(starts, f"the workers of {placements[0].role} have")
        return handles

    async def keep_spare(self, handle: Handle, warm: Callable[[], None]) -> None:
        if isinstance(handle, ProcessHandle) and handle in self._processes and handle.placement in self._spare_placements:
            await self._in_time(handle.keep_spare(warm), f"the spare of {handle.placement.name} has")

    async def restart(self, handle: Handle) -> None:
        if isinstance(handle, ProcessHandle):
            await self._in_time(handle.restart(self._silent_s), f"{handle.placement.name} has")
            return
        if not isinstance(handle, LocalHandle) or handle not in self._makes:
            raise RunError(f"{handle.placement.name} cannot be restarted: this executor runs no such worker")
        self._workers = [worker for worker in self._workers if worker is not handle._worker]
        self._workers.append(await handle.restart(self._makes[handle]))

    async def close(self) -> None:
        processes, self._processes = self._processes, []
        try:
            # waits: each has a deadline and is killed after it
            await asyncio.gather(*(handle.close(_CLOSE_S) for handle in processes))
        finally:
            async with AsyncExitStack() as stack:
                for worker in self._workers:
                    stack.push_async_callback(worker.close)
                self._workers = []
                self._makes.clear()

    def _log_of(self, placement: WorkerPlacement) -> Path | None:
        return None if self._log_dir is None else self._log_dir / f"{placement.role}-{placement.rank}.log"

    async def _in_time(self, starts: Awaitable[Any], who: str) -> None:
        await start_within_deadline(starts, self._start_s, who)


async def start_within_deadline(starts: Awaitable[Any], seconds: float, who: str) -> None:
    """Waits for a start; after `seconds`, raises a `RunError` that says that `who` has not started."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            await starts
    except TimeoutError:
        if not limit.expired():
            raise
        raise RunError(f"{who} not started within {seconds:g} s (ray.start_deadline_s)") from None
