"""Main module of a worker process of the `local` executor.

Methods run in the main thread, where numeric libraries expect them. Calls start in the order in which they arrived; while
a coroutine method waits, other calls run. A second thread reads the connection and answers pings, also while a method
computes.

The process ignores signals and ends with its parent: a job scheduler or a terminal sends signals to all processes of a
job, and the parent, which handles them, may want to save first.
"""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from roll.cluster.errors import CallFailure
from roll.cluster.worker import Worker, WorkerPlacement
from roll.cluster.worker_runtime import CallResult, WorkerRuntime, log_to_stderr, unsendable, where
from roll.config.errors import RunError
from roll.data.remote_columns import Columns
from roll.process.child_main import connect
from roll.process.framing import HEADER, read_payload
from roll.process.gc_tuning import freeze_gc, pause_gc

NUMBER = struct.Struct("!Q")
"""Every payload begins with the number of its request; a payload with nothing else is a ping or its reply."""


@dataclass(frozen=True)
class StartMessage:
    """Creates the worker."""

    placement: WorkerPlacement
    log: Path | None
    make: Callable[[WorkerPlacement], Worker]


@dataclass(frozen=True)
class WarmUpMessage:
    """Prepares the process for the worker: unpickling `make` imports the worker's modules; then `warm` is called."""

    make: Callable[[WorkerPlacement], Worker]
    warm: Callable[[], None]


@dataclass(frozen=True)
class CallMessage:
    """Calls a method of the worker."""

    method: str
    args: Sequence[Any]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class CloseMessage:
    """Closes the worker; the process then ends."""


class _Server:
    def __init__(self, connection: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self._connection = connection
        self._loop = loop
        self._writing = threading.Lock()
        self._runtime: WorkerRuntime | None = None
        self._name = "a worker"
        self._tasks: set[asyncio.Task[None]] = set()
        self.closed = asyncio.Event()

    def read(self) -> None:
        """Runs in a separate thread until the parent has ended; then this process exits."""
        stream = io.BufferedReader(socket.SocketIO(self._connection, "r"))
        while (payload := read_payload(stream)) is not None:
            if len(payload) == NUMBER.size:
                self._send(payload)
            else:
                self._loop.call_soon_threadsafe(self._begin, payload)
        os._exit(0)

    def _begin(self, payload: bytes) -> None:
        (number,) = NUMBER.unpack_from(payload)
        try:
            request = cloudpickle.loads(memoryview(payload)[NUMBER.size :])
        except Exception as error:
            self._send_result(number, unsendable(CallFailure.of(error, self._name, "a call", where())))
            return
        task = self._loop.create_task(self._serve(number, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, number: int, request: StartMessage | WarmUpMessage | CallMessage | CloseMessage) -> None:
        self._send_result(number, await self._execute(request))
        if isinstance(request, CloseMessage):
            self.closed.set()

    async def _execute(
        self, request: StartMessage | WarmUpMessage | CallMessage | CloseMessage
    ) -> CallResult | CallFailure:
        if isinstance(request, StartMessage):
            self._name = request.placement.name
            if request.log is not None:  # the parent redirects this process's stderr to it
                log_to_stderr()
            self._runtime = WorkerRuntime(request.placement, None, _get, None)
            started = await self._runtime.start(request.make)
            freeze_gc()
            return started
        if isinstance(request, WarmUpMessage):
            return self._warm_up(request)
        assert self._runtime is not None, "a worker is started before it is called"
        if isinstance(request, CallMessage):
            return await self._runtime.call(request.method, request.args, request.kwargs)
        try:
            await self._runtime.close()
        except Exception as error:
            return CallFailure.of(error, self._name, "close", where())
        return CallResult()

    def _warm_up(self, request: WarmUpMessage) -> CallResult | CallFailure:
        try:
            request.warm()
        except Exception as error:
            return CallFailure.of(error, self._name, "its warm-up", where())
        return CallResult()

    def _send_result(self, number: int, result: CallResult | CallFailure) -> None:
        try:
            packed = cloudpickle.dumps(result)
        except Exception as error:
            packed = cloudpickle.dumps(unsendable(CallFailure.of(error, self._name, "a result", where())))
        self._send(NUMBER.pack(number), packed)

    def _send(self, *parts: bytes) -> None:
        with self._writing:
            try:
                self._connection.sendall(HEADER.pack(sum(map(len, parts))))
                for part in parts:
                    self._connection.sendall(part)
            except OSError:  # the parent is gone
                os._exit(0)


async def _get(refs: Sequence[Any]) -> Sequence[Columns]:
    raise RunError("a batch refers to tokens in another process, but the local executor sends all tokens with it")


def _ignore_signal(number: int, _: Any) -> None:
    print(f"got {signal.Signals(number).name}, which is for the run's controller to handle", file=sys.stderr)


async def _main() -> None:
    server = _Server(connect(killed_first=False), asyncio.get_running_loop())
    threading.Thread(target=server.read, name="reader", daemon=True).start()
    # waits: until the parent closes the worker; when the parent ends, so does this process
    await server.closed.wait()


def main() -> None:
    pause_gc()  # until the worker has started
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _ignore_signal)
    asyncio.run(_main())
