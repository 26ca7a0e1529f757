"""Main module of an environment process: runs many environments until the pool closes its connection.

One thread reads requests and never waits for an environment. Environment code is imported in the main thread, where
signal handlers can be set. Each environment then runs in its own thread or, if its methods are async, on the shared event
loop. This module imports little, because every replacement of a killed process pays for the imports.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import queue
import socket
import threading
import time
import traceback
from typing import TYPE_CHECKING, BinaryIO, NoReturn, cast

from roll.config.errors import UserError
from roll.env.crash_report import MAIN, confess_by, current
from roll.env.env_instance import EnvInstance, EnvRunner, ThreadRunner
from roll.env.ipc import (
    BY_ITSELF,
    LIMIT_BYTES,
    EnvAct,
    EnvEnding,
    EnvFailed,
    EnvLoad,
    EnvPing,
    EnvReady,
    EnvReset,
    EnvSettled,
    EnvSetUp,
    Result,
    Visit,
    frame,
)
from roll.env.resolve import Factory, unpacked
from roll.process.child_main import command, connect, reason
from roll.process.framing import HEADER, read_payload
from roll.process.memory_limit import MemoryLimit

if TYPE_CHECKING:
    from roll.env.async_runner import SharedLoop

COMMAND = command("roll.env.env_server")

_TELL_S = 1.0
_exit = os._exit  # the original: environments' calls of `os._exit` are intercepted
EXIT_FULL = 113
"""Exit status of a process whose environments left too little memory."""


def main() -> None:
    """Serves the pool that started this process."""
    connection = connect()
    # Only with all threads does the handler name the crashed one; the pool writes the stack of that one to the log.
    faulthandler.enable(connection.fileno(), all_threads=True)
    server = EnvServer(connection)
    confess_by(server.tell_end)
    server.serve()


class EnvServer:
    """Forwards requests to environments, and their results to the pool.

    Nothing here waits for an environment. If the server itself fails, or the pool is gone, the process ends at once
    without waiting for threads or exit handlers of environments.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pid = os.getpid()
        self._writing = threading.Lock()
        self._for_main: queue.SimpleQueue[tuple[int, EnvSetUp | EnvLoad]] = queue.SimpleQueue()
        self._root = ""
        self._memory = MemoryLimit(0)
        self._factories: dict[str, Factory] = {}
        self._runners: dict[int, EnvRunner] = {}
        self._shared_loop: SharedLoop | None = None
        self._making_loop = threading.Lock()

    def serve(self) -> NoReturn:
        threading.Thread(target=self._read, daemon=True).start()
        current.set(MAIN)
        self._answer(BY_ITSELF, EnvSettled(MAIN, threading.get_ident()), 0.0)
        while True:
            # waits: the process ends with its pool
            number, request = self._for_main.get()
            started = time.perf_counter()
            result = self._set_up(request) if isinstance(request, EnvSetUp) else self._load(request)
            self._answer(number, result, time.perf_counter() - started)

    def _read(self) -> None:
        stream = cast(BinaryIO, self._connection.makefile("rb"))
        try:
            while (payload := read_payload(stream)) is not None:
                self._pass_on(*pickle.loads(payload))
            _exit(0)
        except BaseException as error:
            _give_up(error)

    def _pass_on(self, number: int, request: EnvSetUp | EnvPing | EnvLoad | Visit) -> None:
        if isinstance(request, EnvPing):
            self._answer(number, EnvReady(), 0.0)
        elif isinstance(request, EnvSetUp | EnvLoad):
            self._for_main.put((number, request))
        elif isinstance(request, EnvReset):
            self._admit(number, request)
        elif isinstance(request, EnvAct):
            self._runners[request.handle].take(number, request)
        elif request.handle in self._runners:
            self._runners.pop(request.handle).take(number, request)
        else:  # the environment was never created
            self._answer(number, EnvReady(), 0.0)

    def tell_end(self, place: int, how: str) -> None:
        """Reports that an environment is about to end this process."""
        if self._writing.acquire(timeout=_TELL_S):
            with contextlib.suppress(OSError):
                self._connection.sendall(frame((BY_ITSELF, EnvEnding(place, how), 0.0)))
            self._writing.release()

    def _set_up(self, request: EnvSetUp) -> EnvReady:
        self._root = request.root
        self._memory = MemoryLimit(request.memory_mb)
        return EnvReady()

    def _load(self, request: EnvLoad) -> EnvReady | EnvFailed:
        try:
            self._factories[request.name] = unpacked(request.name, request.code, self._root)
        except UserError as error:
            return EnvFailed("invalid", str(error))
        except BaseException as error:
            return EnvFailed("raised", reason(error))
        return EnvReady()

    def _admit(self, number: int, request: EnvReset) -> None:
        """Creates the runner of a new environment."""
        tenant = EnvInstance(self._factories[request.name], self._root, request.handle)
        try:
            home = self._runner(tenant)
        except RuntimeError as error:
            self._answer(number, EnvFailed("lost", f"its process cannot host more environments: {error}"), 0.0)
            return
        self._runners[request.handle] = home
        if isinstance(home, ThreadRunner):
            self._answer(BY_ITSELF, EnvSettled(request.handle, home.thread), 0.0)
        home.take(number, request)

    def _runner(self, tenant: EnvInstance) -> EnvRunner:
        if tenant.is_async:
            from roll.env.async_runner import AsyncRunner

            return AsyncRunner(tenant, self._answer, self._loop(), lambda: self._look_after(tenant))
        self._memory.add_thread()
        return ThreadRunner(tenant, self._answer, self._loop, lambda: self._leave_thread(tenant))

    def _loop(self) -> SharedLoop:
        from roll.env.async_runner import SharedLoop

        with self._making_loop:
            self._shared_loop = self._shared_loop or SharedLoop()
            return self._shared_loop

    def _leave_thread(self, tenant: EnvInstance) -> None:
        self._look_after(tenant)
        self._memory.remove_thread()

    def _look_after(self, tenant: EnvInstance) -> None:
        """Ends the process if an environment reached the memory limit and too little memory is left for the others."""
        if tenant.ran_out and self._memory.is_short():
            _exit(EXIT_FULL)

    def _answer(self, number: int, result: Result | EnvSettled, seconds: float) -> None:
        if os.getpid() != self._pid:  # an environment forked, and the copy of this process reached this code
            _exit(0)
        try:
            message = frame((number, result, seconds))
            if len(message) > HEADER.size + LIMIT_BYTES:
                too_long = f"the environment returned {len(message) >> 20} MB; at most {LIMIT_BYTES >> 20} MB are taken"
                message = frame((number, EnvFailed("invalid", too_long), seconds))
            with self._writing:
                self._connection.sendall(message)
        except BaseException as error:
            _give_up(error)


def _give_up(error: BaseException) -> NoReturn:
    with contextlib.suppress(BaseException):
        traceback.print_exception(error)
    _exit(EXIT_FULL if isinstance(error, MemoryError) else 1)
