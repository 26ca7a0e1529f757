"""Simulated remote workers: a call has latency in both directions, and workers die, hang and are restarted.

Invariants: calls of one caller arrive in order; a call in flight when its worker dies raises `WorkerDied`, even if its
work was done; cancelling a call does not stop its work, unless it reports while it runs. A hanging worker continues its
own work, but neither receives nor sends anything.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from roll.cluster import Worker, WorkerPlacement
from roll.cluster.errors import CallFailure, WorkerDied, WorkerError

W = TypeVar("W", bound=Worker)

_CANCEL_S = 10.0
"""How long a cancelled caller waits for the end of its call."""


class _Reports:
    """Reports of a call on their way: those made while others travel go with them."""

    def __init__(self, report: Callable[[Any], None]) -> None:
        self._report = report
        self._travelling: list[Any] = []

    def add(self, each: Any) -> bool:
        """Whether it is the first on its way."""
        self._travelling.append(each)
        return len(self._travelling) == 1

    def deliver(self) -> None:
        arrived, self._travelling = self._travelling, []
        for each in arrived:
            self._report(each)


class RemoteHandle(Generic[W]):
    """One worker; must be created inside a running event loop."""

    in_process = False

    def __init__(self, make: Callable[[WorkerPlacement], W], placement: WorkerPlacement, way_s: float) -> None:
        self.placement = placement
        self.restart_count = 0
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
        self.restart_count += 1
        self._begin()

    async def call(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        gone, work = self._gone, self._start(method, args, kwargs)
        return await self._result(work, gone)

    async def stream(
        self, method: str, report: Callable[[Any], None], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        gone, moving, reports = self._gone, self._moving, _Reports(report)

        def send(each: Any) -> None:
            if reports.add(each):
                self._keep(asyncio.create_task(deliver()))

        async def deliver() -> None:
            await self._travel(moving)
            if not gone.done():
                reports.deliver()

        work = self._start(method, (send, *args), kwargs)
        try:
            result = await self._result(work, gone)
        except asyncio.CancelledError:
            if not gone.done():
                work.cancel()
                await asyncio.wait({work, gone}, timeout=_CANCEL_S, return_when=asyncio.FIRST_COMPLETED)
            raise
        reports.deliver()
        return result

    def _start(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> asyncio.Task[Any]:
        if self._gone.done():
            raise WorkerDied(self.placement.name, "it was killed")
        function = getattr(self.worker, method)
        return self._keep(asyncio.create_task(self._there_and_back(self._gone, self._moving, function, args, kwargs)))

    def _keep(self, task: asyncio.Task[Any]) -> asyncio.Task[Any]:
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    async def _result(self, work: asyncio.Task[Any], gone: asyncio.Future[None]) -> Any:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            work.cancel()
            raise WorkerDied(self.placement.name, "it was killed")
        return work.result()

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
