"""The pool's handle of one environment process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from roll.config.errors import RunError
from roll.env import ipc
from roll.env.base import EnvFailure, FailureKind
from roll.env.crash_report import FAULT_HEADER, MAIN, crash_location, crashed_thread_id, crashed_thread_output
from roll.env.env_server import COMMAND, EXIT_OUT_OF_MEMORY
from roll.process.bounded_log import LIMIT_BYTES, BoundedLog, is_bounded
from roll.process.framing import HEADER
from roll.process.managed_process import ManagedProcess

_MAX_IN_FLIGHT = 256  # enough for environments that wait, few enough that a computing one meets its deadline
_GRACE_S = 1.0
_EXIT_STATUS_S = 1.0
"""Time to wait for the exit status of a process that closed its connection: its reapers end after it."""
_FAULT_BYTES = 1 << 20

Reply: TypeAlias = tuple[ipc.Result, float]
"""The answer of the process, and the seconds that the environment took."""


@dataclass
class _Call:
    request: ipc.Request
    deadline_s: float
    what: str
    reply: asyncio.Future[Reply]
    ends_s: float = 0.0
    """The time of its deadline, once it is in flight."""
    overdue: asyncio.TimerHandle | None = None
    """Set from the deadline on: it ends the call if the process does not answer a ping."""

    def settle(self, result: Reply | EnvFailure) -> None:
        """Ends the call, also if its caller has cancelled it."""
        if self.overdue is not None:
            self.overdue.cancel()
        if self.reply.done():
            return
        if isinstance(result, EnvFailure):
            self.reply.set_exception(result)
        else:
            self.reply.set_result(result)


class EnvProcess:
    """A process that runs environments. Up to `_MAX_IN_FLIGHT` calls are in flight; more wait, first in, first out.

    Invariant: an in-flight call ends, with a reply or an `EnvFailure`, at most `_GRACE_S` after its deadline, even if its
    caller no longer waits. One environment cannot be ended alone, so a call beyond its deadline ends the process: that
    call fails with `deadline`, the others with `lost`. If the process does not even answer a ping, all in-flight calls
    fail with `deadline`, because one of them blocks it. If the process ends by itself, the call that caused it fails with
    `crashed`, if it is known (`roll.env.crash_report`), and the others with `lost`; otherwise all in-flight calls fail
    with `crashed`, because one of them caused it. Calls that were still waiting, or come after the end, fail with `lost`.
    """

    def __init__(
        self, child: ManagedProcess, on_end: Callable[[EnvProcess], None], log: BoundedLog | None = None
    ) -> None:
        self._child = child
        self._on_end = on_end
        self._numbers = itertools.count()
        self._calls: dict[int, _Call] = {}
        self._queue: deque[_Call] = deque()
        self._timer: asyncio.TimerHandle | None = None
        """Fires at the first deadline of the calls in flight, or before it."""
        self._unsent_frames: list[bytes] = []
        """Frames to be sent together in the next turn of the event loop."""
        self._loads: dict[str, asyncio.Future[Reply]] = {}
        self._end_reason = ""
        self._threads: dict[int, int] = {}
        """The environment of each thread."""
        self._exit_notice: ipc.EnvEnding | None = None
        self._fault_output = b""
        self._log = log
        self._receiver = asyncio.create_task(self._receive())
        self._watcher = asyncio.create_task(self._watch())

    @classmethod
    async def start(
        cls,
        *,
        root: str,
        memory_mb: int,
        deadline_s: float,
        log: Path | None,
        on_end: Callable[[EnvProcess], None],
        log_bytes: int = LIMIT_BYTES,
    ) -> EnvProcess:
        """Starts a process that is ready for environments. `RunError` says why it did not start. `on_end` is called once,
        when the process ends after it was ready."""
        environment = {"PYTHONHASHSEED": "0"}  # sets iterate in the same order in every process
        bounded_log = None if log is None or not is_bounded(log) else BoundedLog(log, log_bytes)
        process = cls(await ManagedProcess.start(COMMAND, log, environment, log_bytes), lambda process: None, bounded_log)
        try:
            await process.ask(ipc.EnvSetUp(root, memory_mb), deadline_s, "starting")
        except EnvFailure as failure:
            await asyncio.shield(process._end_now("it did not start"))
            raise RunError(f"an environment process did not start: {failure.reason}") from None
        except BaseException:
            await asyncio.shield(process._end_now("its start was cancelled"))
            raise
        if process._end_reason:
            await asyncio.shield(process._end_now(process._end_reason))
            raise RunError(f"an environment process ended at once: {process._end_reason}")
        process._on_end = on_end
        return process

    @property
    def pid(self) -> int:
        """The process id, also the id of its process group."""
        return self._child.pid

    @property
    def usable(self) -> bool:
        """Whether it accepts calls."""
        return not (self._end_reason or self._child.exit.done() or self._receiver.done())

    def ask(self, request: ipc.Request, deadline_s: float, what: str) -> asyncio.Future[Reply]:
        """Sends a request, now or when a slot is free. The future may be dropped: the call still ends by its deadline."""
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        reply.add_done_callback(_retrieve_error)
        if self.usable:
            self._queue.append(_Call(request, deadline_s, what, reply))
            self._send_next()
        else:
            reply.set_exception(EnvFailure("lost", self._end_reason or "its process has just ended"))
        return reply

    async def load(self, name: str, code: str | bytes, deadline_s: float) -> None:
        """Has the process import an environment's code once, from `code` if given, otherwise by its name; raises
        `EnvFailure` if that fails."""
        if name not in self._loads:
            self._loads[name] = self.ask(ipc.EnvLoad(name, code), deadline_s, f"importing environment {name!r}")
        reply = self._loads[name]
        try:
            # waits: the call has a deadline
            result, _ = await asyncio.shield(reply)
        except EnvFailure as failure:
            # each waiting caller gets an error object of its own
            raise EnvFailure(failure.kind, failure.reason, candidates=failure.candidates) from None
        if isinstance(result, ipc.EnvFailed):
            if self._loads.get(name) is reply:
                del self._loads[name]  # a later attempt may succeed after the file was fixed
            raise EnvFailure(result.kind, result.reason, result.detail)

    def kill(self, why: str = "the environment pool was closed") -> None:
        """Ends the process and all its children, now. In-flight calls are lost. May be called again."""
        self._end("lost", why)

    async def wait_exit(self) -> None:
        """Waits until a killed process has ended."""
        await self._child.wait_exit()
        for task in (self._watcher, self._receiver):
            task.cancel()

    async def _end_now(self, why: str) -> None:
        self.kill(why)
        await self.wait_exit()

    def _send_next(self) -> None:
        while self._queue and len(self._calls) < _MAX_IN_FLIGHT:
            self._send(self._queue.popleft())

    def _send(self, call: _Call) -> None:
        number = next(self._numbers)
        self._calls[number] = call
        loop = asyncio.get_running_loop()
        call.ends_s = loop.time() + call.deadline_s
        self._wake_by(call.ends_s)
        if not self._unsent_frames:
            loop.call_soon(self._flush_outbox)
        self._unsent_frames.append(ipc.frame((number, call.request)))

    def _flush_outbox(self) -> None:
        frames, self._unsent_frames = self._unsent_frames, []
        self._child.writer.write(b"".join(frames))

    def _wake_by(self, time_s: float) -> None:
        """Sets the timer to this time unless it fires earlier."""
        if self._timer is None or time_s < self._timer.when():
            self._stop_timer()
            self._timer = asyncio.get_running_loop().call_at(time_s, self._check_deadlines)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_deadlines(self) -> None:
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        for number, call in list(self._calls.items()):
            if call.overdue is None and call.ends_s <= now_s:
                self._on_deadline(number)
        waiting = [call.ends_s for call in self._calls.values() if call.overdue is None]
        if waiting and not self._receiver.done():
            self._wake_by(min(waiting))

    def _on_deadline(self, number: int) -> None:
        """A deadline has passed. A reply that has arrived counts, but the event loop may have been blocked and not read
        it yet: the answer to a ping arrives after it."""
        if self._receiver.done():  # the connection broke; `_watch` ends the process for that
            return
        loop, call = asyncio.get_running_loop(), self._calls[number]
        call.overdue = loop.call_later(_GRACE_S, self._fail_stuck, number)
        pong: asyncio.Future[Reply] = loop.create_future()
        pong.add_done_callback(_retrieve_error)
        pong.add_done_callback(lambda _: self._fail_overdue(number))
        self._send(_Call(ipc.EnvPing(), call.deadline_s + _GRACE_S, "a ping", pong))

    def _fail_overdue(self, number: int) -> None:
        call = self._calls.pop(number, None)
        if call is None:
            return
        why = f"{call.what} took more than {call.deadline_s:g} s"
        call.settle(EnvFailure("deadline", why))
        self._end("lost", f"its process was killed, because {why}")

    def _fail_stuck(self, number: int) -> None:
        """The process does not even answer a ping: any environment with an in-flight call may be blocking all of it."""
        call = self._calls.get(number)
        if call is not None and not self._receiver.done():
            self._end("deadline", f"{call.what} took more than {call.deadline_s:g} s, and its whole process is stuck")

    def _end(self, kind: FailureKind, why: str) -> None:
        if self._end_reason:
            return
        self._end_reason = why
        self._stop_timer()
        self._child.kill()
        calls, self._calls = self._calls, {}
        crashed_handle = None if self._exit_notice is None or kind != "crashed" else self._exit_notice.handle
        candidates = (
            1 if crashed_handle is not None else sum(not isinstance(call.request, ipc.EnvPing) for call in calls.values())
        )
        for call in calls.values():
            if crashed_handle is None:
                call.settle(EnvFailure(kind, why, candidates=max(1, candidates)))
            elif crashed_handle == _handle_of(call.request):
                call.settle(EnvFailure(kind, f"it {why}"))
            else:
                call.settle(EnvFailure("lost", f"another environment {why}"))
        while self._queue:
            self._queue.popleft().settle(EnvFailure("lost", why))
        self._on_end(self)

    async def _watch(self) -> None:
        """Waits until the process ends or closes its connection, and records the reason."""
        # waits: for as long as the process lives
        await asyncio.wait({self._receiver, self._child.exit}, return_when=asyncio.FIRST_COMPLETED)
        if self._child.exit.done():
            await asyncio.wait({self._receiver}, timeout=_GRACE_S)  # replies that were sent before the end count
        await asyncio.wait({self._child.exit}, timeout=_EXIT_STATUS_S)
        self._log_fault()
        self._end("lost" if self._exited_out_of_memory() else "crashed", self._exit_reason())

    async def _receive(self) -> None:
        """Passes replies on until the connection ends."""
        with contextlib.suppress(Exception):  # the process ended, or something else wrote to its end of the connection
            while True:
                # waits: the caller has a deadline
                header = await self._child.reader.readexactly(HEADER.size)
                if header == FAULT_HEADER:
                    self._fault_output = header
                    while len(self._fault_output) < _FAULT_BYTES:
                        # waits: the process is about to end
                        more = await self._child.reader.read(_FAULT_BYTES)
                        if not more:
                            break
                        self._fault_output += more
                    return
                (size,) = HEADER.unpack(header)
                if size > ipc.LIMIT_BYTES:
                    return
                # waits: the caller has a deadline
                number, result, seconds = ipc.RESULTS.read(await self._child.reader.readexactly(size))
                if number == ipc.NO_REQUEST:
                    self._receive_notice(result)
                    continue
                if not isinstance(result, ipc.Result) or not isinstance(seconds, float):
                    return
                self._calls.pop(number).settle((result, seconds))
                self._send_next()

    def _receive_notice(self, notice: ipc.Notice) -> None:
        if isinstance(notice, ipc.EnvSettled):
            self._threads[notice.thread] = notice.handle
        else:
            self._exit_notice = notice

    def _log_fault(self) -> None:
        """Logs the output of the process's fault handler, and finds out from it which environment crashed."""
        if not self._fault_output:
            return
        output = crashed_thread_output(self._fault_output)
        if self._log is None:
            sys.stderr.write(output.decode(errors="replace"))
        else:
            self._log.write(output)
        handle = self._threads.get(crashed_thread_id(output) or 0)
        if handle is not None and self._exit_notice is None:
            self._exit_notice = ipc.EnvEnding(handle, f"had a fault{crash_location(output)}")

    def _exit_reason(self) -> str:
        if self._exited_out_of_memory():
            return "its process ended, because the environments in it had taken too much memory"
        ended = f"its process {self._child.exit_reason()}"
        return ended if self._exit_notice is None else f"{self._exit_notice.how}: {ended}"

    def _exited_out_of_memory(self) -> bool:
        return self._child.exit.done() and self._child.exit.result() == EXIT_OUT_OF_MEMORY


def _handle_of(request: ipc.Request) -> int | None:
    """The environment that a request is for."""
    if isinstance(request, ipc.EnvLoad):
        return MAIN
    return None if isinstance(request, ipc.EnvPing | ipc.EnvSetUp) else request.handle


def _retrieve_error(reply: asyncio.Future[Reply]) -> None:
    """Retrieves the error of a call whose caller no longer waits, so that asyncio does not warn."""
    if not reply.cancelled():
        reply.exception()
