"""The event loop that a process's async environments share. Imported when the first of them is created."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from roll.env.env_instance import EnvInstance, SendResult
from roll.env.ipc import EnvCall, EnvClose, Result

R = TypeVar("R")


class SharedLoop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        threading.Thread(target=self._run, daemon=True).start()

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs the coroutine. May be called from any thread."""
        self._loop.call_soon_threadsafe(self._create_task, work)

    def wait_for(self, awaitable: Awaitable[R]) -> R:
        """Awaits something on behalf of a thread other than the loop's."""

        async def wait() -> R:
            # waits: the pool has a deadline for every call
            return await awaitable

        return asyncio.run_coroutine_threadsafe(wait(), self._loop).result()

    def _create_task(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._loop.create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while True:
            try:
                self._loop.run_forever()
            except BaseException:  # a task of an environment called sys.exit(): the others continue
                traceback.print_exc()


class AsyncRunner:
    """Runs an environment on the shared event loop."""

    def __init__(
        self, instance: EnvInstance, send_result: SendResult, loop: SharedLoop, on_closed: Callable[[], None]
    ) -> None:
        """`on_closed` is called when the environment has been closed."""
        self._instance = instance
        self._send_result = send_result
        self._loop = loop
        self._on_closed = on_closed

    def submit(self, number: int, request: EnvCall) -> None:
        self._loop.start(lambda: self._serve(number, request))

    async def _serve(self, number: int, request: EnvCall) -> None:
        started = time.perf_counter()
        result = await self._result(request)
        if isinstance(request, EnvClose):
            self._on_closed()
        self._send_result(number, result, time.perf_counter() - started)

    async def _result(self, request: EnvCall) -> Result:
        try:
            returned = self._instance.begin(request)
            if inspect.isawaitable(returned):
                # waits: the pool has a deadline for every call
                returned = await returned
        except BaseException as error:
            return self._instance.fail(error)
        return self._instance.finish(request, returned)
