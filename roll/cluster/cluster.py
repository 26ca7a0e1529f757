"""A cluster: one role's workers, called as one.

    update = await actor.call(TrainWorker.update, batch, loss, step)

names the method itself. The call fans out as the method's `@parallel` says and comes back as one result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

from roll.cluster.executor import Executor, Handle
from roll.cluster.worker import Dispatch, Place, Worker, parallel_of
from roll.data.batch import Batch
from roll.data.columns import Indices

W = TypeVar("W", bound=Worker)
P = ParamSpec("P")
R = TypeVar("R")


class Cluster(Generic[W]):
    def __init__(self, role: str, handles: Sequence[Handle]) -> None:
        if not handles:
            raise ValueError(f"role {role!r} has no workers")
        self.role = role
        self._handles = list(handles)

    @classmethod
    async def start(cls, executor: Executor, make: Callable[[Place], W], places: Sequence[Place]) -> Cluster[W]:
        return cls(places[0].role, await executor.start(make, places))

    def __len__(self) -> int:
        return len(self._handles)

    @overload
    async def call(self, method: Callable[Concatenate[W, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    async def call(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> R: ...
    async def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a `@parallel` method on the role's workers and joins their results."""
        how = parallel_of(method)
        name = method.__name__
        if how.dispatch is Dispatch.ONE or (how.dispatch is Dispatch.DATA and len(self) == 1):
            return await self._handles[0].call(name, args, kwargs)
        if how.dispatch is Dispatch.ALL:
            return (await asyncio.gather(*(h.call(name, args, kwargs) for h in self._handles)))[0]
        whole, parts = _split(method, args, len(self))
        calls = [
            handle.call(name, [arg.select(part) if isinstance(arg, Batch) else arg for arg in args], kwargs)
            for handle, part in zip(self._handles, parts, strict=True)
        ]
        assert how.join is not None
        return how.join(await asyncio.gather(*calls), parts, whole)

    async def call_each(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Calls a `@parallel` method with the same arguments on every worker; one result each, by rank."""
        parallel_of(method)
        results = await asyncio.gather(*(h.call(method.__name__, args, kwargs) for h in self._handles))
        return cast(list[R], list(results))

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
        return await self._handles[rank].call(method.__name__, args, kwargs)


def _split(method: Callable[..., Any], args: Sequence[Any], parts: int) -> tuple[Batch, list[Indices]]:
    batches = [arg for arg in args if isinstance(arg, Batch)]
    if len(batches) != 1:
        raise TypeError(f"{method.__qualname__} is dispatched by data: pass it one Batch, by position")
    return batches[0], batches[0].split(parts)
