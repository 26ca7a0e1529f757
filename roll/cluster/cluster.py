"""A cluster: one role's workers, called as one.

    update = await actor.call(TrainWorker.update, batch, loss, step)

names the method itself. The call fans out as the method's `@parallel` says and comes back as one result. Every call has
a deadline. A cluster may travel to other workers, which then call its workers directly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

from roll.cluster.errors import CallTimedOut, first_of
from roll.cluster.executor import Executor, Handle
from roll.cluster.worker import Dispatch, Place, Worker, parallel_of
from roll.data.batch import Batch
from roll.data.columns import Indices

W = TypeVar("W", bound=Worker)
P = ParamSpec("P")
R = TypeVar("R")


_GRACE_S = 1.0
"""How long the other workers of a call are heard after one has failed: the first cause may be theirs."""


class Cluster(Generic[W]):
    def __init__(self, role: str, handles: Sequence[Handle], deadline_s: float = 1800.0) -> None:
        if not handles:
            raise ValueError(f"role {role!r} has no workers")
        self.role = role
        self.deadline_s = deadline_s
        self._handles = list(handles)

    @classmethod
    async def start(cls, executor: Executor, make: Callable[[Place], W], places: Sequence[Place]) -> Cluster[W]:
        return cls(places[0].role, await executor.start(make, places), executor.deadline_s)

    @property
    def places(self) -> list[Place]:
        return [handle.place for handle in self._handles]

    def __len__(self) -> int:
        return len(self._handles)

    @property
    def in_process(self) -> bool:
        """Whether all workers are in this process."""
        return all(handle.in_process for handle in self._handles)

    @overload
    async def call(self, method: Callable[Concatenate[W, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    async def call(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> R: ...
    async def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a `@parallel` method on the role's workers and joins their results."""
        how = parallel_of(method)
        if how.dispatch is Dispatch.ONE or (how.dispatch is Dispatch.DATA and len(self) == 1):
            return await self._call(self._handles[0], method, args, kwargs)
        if how.dispatch is Dispatch.ALL:
            return (await self._together([self._call(h, method, args, kwargs) for h in self._handles]))[0]
        whole, parts = _split(method, args, len(self))
        calls = [
            self._call(handle, method, [arg.select(part) if isinstance(arg, Batch) else arg for arg in args], kwargs)
            for handle, part in zip(self._handles, parts, strict=True)
        ]
        assert how.join is not None
        return how.join(await self._together(calls), parts, whole)

    async def call_each(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Calls a `@parallel` method with the same arguments on every worker; one result each, by rank."""
        parallel_of(method)
        results = await self._together([self._call(h, method, args, kwargs) for h in self._handles])
        return cast(list[R], results)

    @overload
    async def call_rank(
        self, rank: int, method: Callable[Concatenate[W, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    @overload
    async def call_rank(
        self, rank: int, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    async def call_rank(self, rank: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a `@parallel` method on one worker."""
        parallel_of(method)
        return await self._call(self._handles[rank], method, args, kwargs)

    async def _call(self, handle: Handle, method: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        limit = asyncio.timeout(self.deadline_s)
        try:
            async with limit:
                return await handle.call(method.__name__, args, kwargs)
        except TimeoutError:
            if limit.expired():
                raise CallTimedOut(handle.place.name, method.__name__, self.deadline_s) from None
            raise

    @staticmethod
    async def _together(calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """All results. After a failure the others are heard for a moment, and the earliest error is raised."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if pending:
                done, _ = await asyncio.wait(tasks, timeout=_GRACE_S)
            errors = [error for task in tasks if task in done and (error := task.exception()) is not None]
            if errors:
                raise first_of(errors)
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()


def _split(method: Callable[..., Any], args: Sequence[Any], parts: int) -> tuple[Batch, list[Indices]]:
    batches = [arg for arg in args if isinstance(arg, Batch)]
    if len(batches) != 1:
        raise TypeError(f"{method.__qualname__} is dispatched by data: pass it one Batch, by position")
    return batches[0], batches[0].split(parts)
