"""Simulated remote workers: a call has latency in both directions, and workers die, hang and are restarted.

Invariants: calls of one caller arrive in order; a call in flight when its worker dies raises `WorkerDied`, even if its
work was done; cancelling a call does not stop its work. A hanging worker continues its own work, but neither receives nor
sends anything.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from roll.cluster import Worker, WorkerPlacement
from roll.cluster.errors import CallFailure, WorkerDied, WorkerError

W = TypeVar("W", bound=Worker)


class RemoteHandle(Generic[W]):
    """One worker; must be created inside a running event loop."""

    in_process = False

    def __init__(self, make: Callable[[WorkerPlacement], W], placement: WorkerPlacement, way_s: float) -> None:
        self.placement = placement
        self.incarnation = 0
        self._make = make
        self._way_s = way_s
        self._calls: set[asyncio.Task[Any]] = set()
        self._begin()

    def _begin(self) -> None:
        self.worker = self._make(self.placement)
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._moving = asyncio.Event()
        self._moving.set()

    @property
    def alive(self) -> bool:
        return not self._gone.done()

    @property
    def well(self) -> bool:
        return self.alive and self._moving.is_set()

    def hang(self) -> None:
        self._moving.clear()

    def kill(self) -> None:
        if self.alive:
            self._gone.set_result(None)

    def restart(self) -> None:
        """Replaces a worker that died by a new one."""
        self.kill()
        self.incarnation += 1
        self._begin()

    async def call(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        gone = self._gone
        if gone.done():
            raise WorkerDied(self.placement.name, "it was killed")
        work = asyncio.create_task(self._there_and_back(gone, self._moving, getattr(self.worker, method), args, kwargs))
        self._calls.add(work)
        work.add_done_callback(self._calls.discard)
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            work.cancel()
            raise WorkerDied(self.placement.name, "it was killed")
        return work.result()

    async def stream(
        self, method: str, report: Callable[[Any], None], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """A method that reports while it runs; nothing simulated has one."""
        raise TypeError(f"{self.placement.name}.{method} cannot report")

    async def _there_and_back(
        self,
        gone: asyncio.Future[None],
        moving: asyncio.Event,
        method: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        await self._travel(moving)
        if gone.done():
            return None
        try:
            result = method(*args, **kwargs)
            result = await result if inspect.isawaitable(result) else result
        except Exception as error:
            raise WorkerError(CallFailure.of(error, self.placement.name, method.__name__, "simulated")) from error
        finally:
            await self._travel(moving)
        return result

    async def _travel(self, moving: asyncio.Event) -> None:
        await asyncio.sleep(self._way_s)
        await moving.wait()

    async def end(self, deadline_s: float) -> None:
        self.kill()

    async def ping(self, deadline_s: float) -> None:
        await self.call("ping", (), {})
