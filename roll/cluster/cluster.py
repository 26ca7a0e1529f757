"""The Cluster of the paper (arXiv 2506.06122): the workers of one role, called by the single controller as one object.

    update = await actor.call(TrainWorker.update, batch, loss, step)

names the method itself. The call fans out as the method's `@dispatch` says and returns one result. Every call has a
deadline. A cluster can be sent to other workers, which then call its workers directly; it has to be sent again after a
worker was restarted. Only the process that started the cluster can restart workers.

Workers that are the ranks of a mesh form a group and fail together: when one rank dies, the cluster ends all of them at
once, because the others would wait for it, and restarts them together in new processes. The error that callers get names
the rank that died. Only the cluster that started the group ends it: a copy in another process raises the error and leaves
the group alone.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from roll.cluster.errors import CallTimedOut, RemoteError, WorkerDied, first_of
from roll.cluster.executor import Executor, Handle
from roll.cluster.pending_calls import PendingCall, PendingCalls
from roll.cluster.worker import Dispatch, SharedArguments, Worker, WorkerPlacement, dispatch_of
from roll.config.errors import RunError
from roll.data.batch import Batch
from roll.data.remote_columns import Indices
from roll.process.structured_gather import structured_gather

W = TypeVar("W", bound=Worker)
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


_log = logging.getLogger(__name__)

_GRACE_S = 1.0
"""How long a call waits for its other workers after one has failed: one of them may report the original error."""
_PING_S = 5.0
"""Deadline of a ping to a rank that has not answered its call, after another rank has failed."""


class Cluster(Generic[W]):
    """The workers of one role: a call to a cluster fans out to them and joins their results."""

    def __init__(
        self, role: str, handles: Sequence[Handle], deadline_s: float = 1800.0, executor: Executor | None = None
    ) -> None:
        """`executor` is the executor that started the workers; without it they can be called but not restarted."""
        if not handles:
            raise ValueError(f"role {role!r} has no workers")
        self.role = role
        self.deadline_s = deadline_s
        self._handles = list(handles)
        self._executor = executor
        self._pending = PendingCalls(deadline_s)
        self.group_failure: RemoteError | None = None
        """The error of the rank that failed first and made the cluster end its group. None while the group is healthy,
        and if the workers are no group."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Cluster, (self.role, self._handles, self.deadline_s)

    @classmethod
    async def start(
        cls, executor: Executor, make: Callable[[WorkerPlacement], W], placements: Sequence[WorkerPlacement]
    ) -> Cluster[W]:
        """Starts one worker per placement; `make` runs in the worker's process."""
        return cls(placements[0].role, await executor.start(make, placements), executor.deadline_s, executor)

    @property
    def placements(self) -> list[WorkerPlacement]:
        """Placement of each worker, by rank."""
        return [handle.placement for handle in self._handles]

    def __len__(self) -> int:
        return len(self._handles)

    @property
    def is_group(self) -> bool:
        """Whether the workers are the ranks of a mesh, which execute every call together."""
        return self._handles[0].placement.mesh is not None

    @property
    def restart_units(self) -> list[list[int]]:
        """Sets of ranks that fail and restart together: all ranks of a group, or each worker alone."""
        ranks = list(range(len(self)))
        return [ranks] if self.is_group else [[rank] for rank in ranks]

    @property
    def in_process(self) -> bool:
        """Whether all workers run in this process."""
        return all(handle.in_process for handle in self._handles)

    def subset(self, ranks: Sequence[int]) -> Cluster[W]:
        """A cluster of some of the workers, numbered from 0 in this order; their placements keep the rank in the role."""
        some: Cluster[W] = Cluster(self.role, [self._handles[r] for r in ranks], self.deadline_s, self._executor)
        some._pending = self._pending
        return some

    def snapshot(self) -> Cluster[W]:
        """The cluster as a worker in another process would receive it: its handles keep pointing to the current worker
        processes, also after a restart."""
        sent: Cluster[W] = Cluster(self.role, [copy.copy(handle) for handle in self._handles], self.deadline_s)
        sent._pending = self._pending
        return sent

    def restart_count(self, rank: int) -> int:
        """How often the worker has been restarted."""
        return self._handles[rank].restart_count

    async def ping(self, rank: int, deadline_s: float) -> None:
        """Returns once the worker's process has answered; raises `WorkerDied` or `CallTimedOut`."""
        await self._handles[rank].ping(deadline_s)

    async def lost_node(self, rank: int) -> str | None:
        """Names the lost node of a worker and why it is lost; None while the node is alive. For a group, the first lost
        node. Raises `ClusterLost`."""
        if self._executor is None:
            return None
        for handle in self._unit(rank):
            if (node := await self._executor.lost_node(handle.placement)) is not None:
                return node
        return None

    async def keep_spares(self, warm: Callable[[], None]) -> None:
        """Keeps a warm spare process ready for each worker (see `Executor.keep_spare`)."""
        if self._executor is not None:
            for handle in self._handles:
                await self._executor.keep_spare(handle, warm)

    async def restart(self, rank: int) -> None:
        """Ends the worker's process and starts a new worker with the same placement (see `Executor.restart`); for a
        group, all ranks at the same time."""
        executor = self._executor
        if executor is None:
            name = self._handles[rank].placement.name
            raise RunError(f"{name} cannot be restarted here: only where its cluster was started")
        await structured_gather(executor.restart(handle) for handle in self._unit(rank))
        self.group_failure = None

    async def end(self, rank: int, why: RemoteError | None = None) -> None:
        """Ends a worker's process, or the processes of all ranks of a group. In-flight calls raise `WorkerDied`, or `why`
        if the cluster ends the group."""
        if self.is_group and self.group_failure is None:
            self.group_failure = why
        await structured_gather(handle.end(self.deadline_s) for handle in self._unit(rank))

    def _unit(self, rank: int) -> Sequence[Handle]:
        return self._handles if self.is_group else [self._handles[rank]]

    def pending(self) -> list[PendingCall]:
        """The in-flight calls of this cluster and its subsets, oldest first."""
        return list(self._pending)

    @overload
    async def call(self, method: Callable[Concatenate[W, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    async def call(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> R: ...
    async def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a `@dispatch` method on the role's workers and joins their results. If the workers are the ranks of a
        mesh, every rank gets the whole call, whatever its dispatch, and the result is rank 0's."""
        how = dispatch_of(method)
        if self.is_group:
            return (await self._call_all(method, args, kwargs))[0]
        if how.dispatch is Dispatch.ONE or (how.dispatch is Dispatch.DATA and len(self) == 1):
            return await self._call(self._handles[0], method, args, kwargs)
        if how.dispatch is Dispatch.ALL:
            return (await self._call_all(method, args, kwargs))[0]
        whole, parts = _split(method, args, len(self))
        calls = [
            self._call(handle, method, [arg.select(part) if isinstance(arg, Batch) else arg for arg in args], kwargs)
            for handle, part in zip(self._handles, parts, strict=True)
        ]
        assert how.join is not None
        return how.join(await self._await_all(calls), parts, whole)

    @overload
    async def call_each(
        self, method: Callable[Concatenate[W, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]: ...
    @overload
    async def call_each(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]: ...
    async def call_each(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Calls a `@dispatch` method with the same arguments on every worker; returns one result per rank. For the ranks
        of a mesh the method must be `Dispatch.ALL`: only those have a result per rank."""
        if self.is_group and dispatch_of(method).dispatch is not Dispatch.ALL:
            raise TypeError(f"{method.__qualname__} has no result per rank: only methods dispatched to all workers have")
        dispatch_of(method)
        return await self._call_all(method, args, kwargs)

    @overload
    async def call_rank(
        self, rank: int, method: Callable[Concatenate[W, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    @overload
    async def call_rank(
        self, rank: int, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    async def call_rank(self, rank: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a `@dispatch` method on one worker."""
        dispatch_of(method)
        call = self._call(self._handles[rank], method, args, kwargs)
        return (await self._await_group({rank: call}))[0] if self.is_group else await call

    def stream_rank(
        self,
        rank: int,
        method: Callable[Concatenate[W, Callable[[S], None], P], Awaitable[R]],
        report: Callable[[S], None],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Coroutine[Any, Any, R]:
        """Calls a batched `@dispatch` method on one worker, which reports while it runs: `report` gets each report. The
        call has no deadline of its own: it ends with its result, with the worker's death, or when its caller is
        cancelled."""
        return self._handles[rank].stream(method.__name__, report, args, kwargs)

    async def _call(self, handle: Handle, method: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = method.__name__
        return await self._pending.run(handle.placement.name, name, handle.call(name, args, kwargs))

    async def _call_all(self, method: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        shared = SharedArguments(args)
        calls = [self._call(handle, method, shared, kwargs) for handle in self._handles]
        return await (self._await_group(dict(enumerate(calls))) if self.is_group else self._await_all(calls))

    async def _await_group(self, calls: Mapping[int, Coroutine[Any, Any, Any]]) -> list[Any]:
        """Awaits calls on ranks of a group. After an error the ranks are still synchronized only if each of them has
        answered; if not, the cluster ends the group."""
        tasks = {rank: asyncio.ensure_future(call) for rank, call in calls.items()}
        try:
            # waits: each of them is a call, which has a deadline
            await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
            if errors := _errors(tasks.values()):
                raise await self._group_error(tasks, errors)
            return [task.result() for task in tasks.values()]
        finally:
            for task in tasks.values():
                task.cancel()

    async def _group_error(self, tasks: Mapping[int, asyncio.Task[Any]], errors: list[BaseException]) -> BaseException:
        """The error to raise. A rank may report a lost connection before the death of its peer is detected, or while the
        peer hangs: then the error to raise is the peer's."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _GRACE_S
        while self.group_failure is None and not _deaths(errors) and (remaining_s := until_s - loop.time()) > 0:
            pending = [task for task in tasks.values() if not task.done()]
            if not pending:
                break
            await asyncio.wait(pending, timeout=remaining_s, return_when=asyncio.FIRST_COMPLETED)
            errors = _errors(tasks.values())
        lost = self.group_failure or first_of(_deaths(errors))
        silent = [rank for rank, task in tasks.items() if not task.done() or isinstance(task.exception(), CallTimedOut)]
        if lost is None and (silent or _remote(errors)):
            peers = [rank for rank in range(len(self)) if rank not in tasks]
            pings = (self.ping(rank, _PING_S) for rank in (*silent, *peers))
            lost = first_of(_remote(await asyncio.gather(*pings, return_exceptions=True)))
        error = lost or first_of(errors)
        assert error is not None, "there is an error to raise"
        if lost is not None or silent:
            await self._end_group(error)
        return copy.copy(error) if isinstance(error, RemoteError) else error  # the group's loss is raised more than once

    async def _end_group(self, error: BaseException) -> None:
        if self._executor is None:
            return
        try:
            await self.end(0, error if isinstance(error, RemoteError) else None)
        except RunError as end_error:
            _log.warning("%s", end_error)

    @staticmethod
    async def _await_all(calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """All results. After a failure, waits up to `_GRACE_S` for the other calls and raises the earliest error."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            # waits: each of them is a call, which has a deadline
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if pending:
                done, _ = await asyncio.wait(tasks, timeout=_GRACE_S)
            if (error := first_of(_errors(done))) is not None:
                raise error
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()


def _errors(tasks: Iterable[asyncio.Task[Any]]) -> list[BaseException]:
    """The errors of the tasks that are done."""
    done = [task for task in tasks if task.done() and not task.cancelled()]
    return [error for task in done if (error := task.exception()) is not None]


def _deaths(errors: Iterable[BaseException]) -> list[RemoteError]:
    return [error for error in errors if isinstance(error, WorkerDied)]


def _remote(results: Iterable[Any]) -> list[RemoteError]:
    return [error for error in results if isinstance(error, RemoteError)]


def _split(method: Callable[..., Any], args: Sequence[Any], parts: int) -> tuple[Batch, list[Indices]]:
    batches = [arg for arg in args if isinstance(arg, Batch)]
    if len(batches) != 1:
        raise TypeError(f"{method.__qualname__} is dispatched by data: pass it one Batch, by position")
    return batches[0], batches[0].split(parts)
