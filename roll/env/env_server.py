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
from roll.env.crash_report import MAIN, current_env, report_exits
from roll.env.env_instance import EnvInstance, EnvRunner, ThreadRunner
from roll.env.ipc import (
    LIMIT_BYTES,
    NO_REQUEST,
    EnvAct,
    EnvCall,
    EnvEnding,
    EnvFailed,
    EnvLoad,
    EnvPing,
    EnvReady,
    EnvReset,
    EnvSettled,
    EnvSetUp,
    Result,
    frame,
)
from roll.env.resolve import Factory, load_factory
from roll.process.child_main import command, connect, reason
from roll.process.framing import HEADER, read_payload
from roll.process.memory_limit import MemoryLimit

if TYPE_CHECKING:
    from roll.env.shared_loop import SharedLoop

COMMAND = command("roll.env.env_server")

_REPORT_S = 1.0
_exit = os._exit  # the original: environments' calls of `os._exit` are intercepted
EXIT_OUT_OF_MEMORY = 113
"""Exit status of a process whose environments left too little memory."""


def main() -> None:
    """Serves the pool that started this process."""
    connection = connect()
    # Only with all threads does the handler name the crashed one; the pool writes the stack of that one to the log.
    faulthandler.enable(connection.fileno(), all_threads=True)
    server = EnvServer(connection)
    report_exits(server.report_exit)
    server.serve()


class EnvServer:
    """Forwards requests to environments, and their results to the pool.

    Nothing here waits for an environment. If the server itself fails, or the pool is gone, the process ends at once
    without waiting for threads or exit handlers of environments.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pid = os.getpid()
        self._write_lock = threading.Lock()
        self._main_requests: queue.SimpleQueue[tuple[int, EnvSetUp | EnvLoad]] = queue.SimpleQueue()
        self._root = ""
        self._memory = MemoryLimit(0)
        self._factories: dict[str, Factory] = {}
        self._runners: dict[int, EnvRunner] = {}
        self._shared_loop: SharedLoop | None = None
        self._loop_lock = threading.Lock()

    def serve(self) -> NoReturn:
        threading.Thread(target=self._read, daemon=True).start()
        current_env.set(MAIN)
        self._send_result(NO_REQUEST, EnvSettled(MAIN, threading.get_ident()), 0.0)
        while True:
            # waits: the process ends with its pool
            number, request = self._main_requests.get()
            started = time.perf_counter()
            result = self._set_up(request) if isinstance(request, EnvSetUp) else self._load(request)
            self._send_result(number, result, time.perf_counter() - started)

    def _read(self) -> None:
        stream = cast(BinaryIO, self._connection.makefile("rb"))
        try:
            while (payload := read_payload(stream)) is not None:
                self._dispatch(*pickle.loads(payload))
            _exit(0)
        except BaseException as error:
            _exit_with(error)

    def _dispatch(self, number: int, request: EnvSetUp | EnvPing | EnvLoad | EnvCall) -> None:
        if isinstance(request, EnvPing):
            self._send_result(number, EnvReady(), 0.0)
        elif isinstance(request, EnvSetUp | EnvLoad):
            self._main_requests.put((number, request))
        elif isinstance(request, EnvReset):
            self._create(number, request)
        elif isinstance(request, EnvAct):
            self._runners[request.handle].submit(number, request)
        elif request.handle in self._runners:
            self._runners.pop(request.handle).submit(number, request)
        else:  # the environment was never created
            self._send_result(number, EnvReady(), 0.0)

    def report_exit(self, handle: int, how: str) -> None:
        """Reports that an environment is about to end this process."""
        if self._write_lock.acquire(timeout=_REPORT_S):
            with contextlib.suppress(OSError):
                self._connection.sendall(frame((NO_REQUEST, EnvEnding(handle, how), 0.0)))
            self._write_lock.release()

    def _set_up(self, request: EnvSetUp) -> EnvReady:
        self._root = request.root
        self._memory = MemoryLimit(request.memory_mb)
        return EnvReady()

    def _load(self, request: EnvLoad) -> EnvReady | EnvFailed:
        try:
            self._factories[request.name] = load_factory(request.name, request.code, self._root)
        except UserError as error:
            return EnvFailed("invalid", str(error))
        except BaseException as error:
            return EnvFailed("raised", reason(error))
        return EnvReady()

    def _create(self, number: int, request: EnvReset) -> None:
        """Creates the runner of a new environment."""
        instance = EnvInstance(self._factories[request.name], self._root, request.handle)
        try:
            runner = self._runner(instance)
        except RuntimeError as error:
            self._send_result(number, EnvFailed("lost", f"its process cannot run more environments: {error}"), 0.0)
            return
        self._runners[request.handle] = runner
        if isinstance(runner, ThreadRunner):
            self._send_result(NO_REQUEST, EnvSettled(request.handle, runner.thread), 0.0)
        runner.submit(number, request)

    def _runner(self, instance: EnvInstance) -> EnvRunner:
        if instance.is_async:
            from roll.env.async_runner import AsyncRunner

            return AsyncRunner(instance, self._send_result, self._loop(), lambda: self._check_memory(instance))
        self._memory.add_thread()
        return ThreadRunner(instance, self._send_result, self._loop, lambda: self._on_thread_closed(instance))

    def _loop(self) -> SharedLoop:
        from roll.env.shared_loop import SharedLoop

        with self._loop_lock:
            self._shared_loop = self._shared_loop or SharedLoop()
            return self._shared_loop

    def _on_thread_closed(self, instance: EnvInstance) -> None:
        self._check_memory(instance)
        self._memory.remove_thread()

    def _check_memory(self, instance: EnvInstance) -> None:
        """Ends the process if an environment reached the memory limit and too little memory is left for the others."""
        if instance.hit_memory_limit and self._memory.is_short():
            _exit(EXIT_OUT_OF_MEMORY)

    def _send_result(self, number: int, result: Result | EnvSettled, seconds: float) -> None:
        if os.getpid() != self._pid:  # an environment forked, and the copy of this process reached this code
            _exit(0)
        try:
            message = frame((number, result, seconds))
            if len(message) > HEADER.size + LIMIT_BYTES:
                too_long = f"the environment returned {len(message) >> 20} MB; at most {LIMIT_BYTES >> 20} MB are taken"
                message = frame((number, EnvFailed("invalid", too_long), seconds))
            with self._write_lock:
                self._connection.sendall(message)
        except BaseException as error:
            _exit_with(error)


def _exit_with(error: BaseException) -> NoReturn:
    with contextlib.suppress(BaseException):
        traceback.print_exception(error)
    _exit(EXIT_OUT_OF_MEMORY if isinstance(error, MemoryError) else 1)
