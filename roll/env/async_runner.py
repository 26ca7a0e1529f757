"""Runs async environments on the event loop that they share. Imported when the first of them is created."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable

from roll.env.env_instance import EnvInstance, SendResult
from roll.env.ipc import EnvCall, EnvClose, Result
from roll.env.shared_loop import SharedLoop


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
