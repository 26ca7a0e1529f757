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
from roll.env.crash_report import FAULT, MAIN, faulty_line, faulty_part, faulty_thread
from roll.env.env_server import COMMAND, EXIT_FULL
from roll.process.bounded_log import LIMIT_BYTES, BoundedLog, is_bounded
from roll.process.framing import HEADER
from roll.process.managed_process import ManagedProcess

_AT_ONCE = 256  # enough for environments that wait, few enough that a computing one meets its deadline
_GRACE_S = 1.0
_LAST_WORDS_S = 1.0
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
    timer: asyncio.TimerHandle | None = None

    def settle(self, result: Reply | EnvFailure) -> None:
        """Ends the call, also if its caller has cancelled it."""
        if self.timer is not None:
            self.timer.cancel()
        if self.reply.done():
            return
        if isinstance(result, EnvFailure):
            self.reply.set_exception(result)
        else:
            self.reply.set_result(result)


class EnvProcess:
    """A process that runs environments. Up to `_AT_ONCE` calls are in flight; more wait, first in, first out.

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
        self._outbox: list[bytes] = []
        """Frames to be sent together in the next turn of the event loop."""
        self._loads: dict[str, asyncio.Future[Reply]] = {}
        self._why = ""
        self._threads: dict[int, int] = {}
        """The environment of each thread."""
        self._ending: ipc.EnvEnding | None = None
        self._fault = b""
        self._log = log
        self._hearing = asyncio.create_task(self._receive())
        self._watching = asyncio.create_task(self._watch())

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
        same_order = {"PYTHONHASHSEED": "0"}  # sets iterate in the same order in every process
        words = None if log is None or not is_bounded(log) else BoundedLog(log, log_bytes)
        host = cls(await ManagedProcess.start(COMMAND, log, same_order, log_bytes), lambda host: None, words)
        try:
            await host.ask(ipc.EnvSetUp(root, memory_mb), deadline_s, "starting")
        except EnvFailure as failure:
            await asyncio.shield(host.end("it did not start"))
            raise RunError(f"an environment process did not start: {failure.reason}") from None
        except BaseException:
            await asyncio.shield(host.end("it is not wanted any more"))
            raise
        if host._why:
            await asyncio.shield(host.end(host._why))
            raise RunError(f"an environment process ended at once: {host._why}")
        host._on_end = on_end
        return host

    @property
    def pid(self) -> int:
        """The process id, also the id of its process group."""
        return self._child.pid

    @property
    def usable(self) -> bool:
        """Whether it accepts calls."""
        return not (self._why or self._child.exit.done() or self._hearing.done())

    def ask(self, request: ipc.Request, deadline_s: float, what: str) -> asyncio.Future[Reply]:
        """Sends a request, now or when a slot is free. The future may be dropped: the call still ends by its deadline."""
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        reply.add_done_callback(_seen)
        if self.usable:
            self._queue.append(_Call(request, deadline_s, what, reply))
            self._send_next()
        else:
            reply.set_exception(EnvFailure("lost", self._why or "its process has just ended"))
        return reply

    async def load(self, name: str, code: str | bytes, deadline_s: float) -> None:
        """Has the process import an environment's code once, from `code` if given, otherwise by its name; raises
        `EnvFailure` if that fails."""
        if name not in self._loads:
            self._loads[name] = self.ask(ipc.EnvLoad(name, code), deadline_s, f"importing environment {name!r}")
        load = self._loads[name]
        try:
            # waits: the call has a deadline
            result, _ = await asyncio.shield(load)
        except EnvFailure as failure:
            # each waiting caller gets an error object of its own
            raise EnvFailure(failure.kind, failure.reason, suspects=failure.suspects) from None
        if isinstance(result, ipc.EnvFailed):
            if self._loads.get(name) is load:
                del self._loads[name]  # a later attempt may succeed after the file was fixed
            raise EnvFailure(result.kind, result.reason, result.detail)

    async def end(self, why: str) -> None:
        """Ends the process and all its children, and waits for that. In-flight calls are lost. May be called again."""
        self._end("lost", why)
        await self._child.wait_exit()
        for task in (self._watching, self._hearing):
            task.cancel()

    def _send_next(self) -> None:
        while self._queue and len(self._calls) < _AT_ONCE:
            self._send(self._queue.popleft())

    def _send(self, call: _Call) -> None:
        number = next(self._numbers)
        self._calls[number] = call
        loop = asyncio.get_running_loop()
        call.timer = loop.call_later(call.deadline_s, self._late, number)
        if not self._outbox:
            loop.call_soon(self._send_out)
        self._outbox.append(ipc.frame((number, call.request)))

    def _send_out(self) -> None:
        frames, self._outbox = self._outbox, []
        self._child.writer.write(b"".join(frames))

    def _late(self, number: int) -> None:
        """A deadline has passed. A reply that has arrived counts, but the event loop may have been blocked and not read
        it yet: the answer to a ping arrives after it."""
        if self._hearing.done():  # the connection broke; `_watch` ends the process for that
            return
        loop, call = asyncio.get_running_loop(), self._calls[number]
        call.timer = loop.call_later(_GRACE_S, self._stuck, number)
        pong: asyncio.Future[Reply] = loop.create_future()
        pong.add_done_callback(_seen)
        pong.add_done_callback(lambda _: self._overdue(number))
        self._send(_Call(ipc.EnvPing(), call.deadline_s + _GRACE_S, "a ping", pong))

    def _overdue(self, number: int) -> None:
        call = self._calls.pop(number, None)
        if call is None:
            return
        why = f"{call.what} took more than {call.deadline_s:g} s"
        call.settle(EnvFailure("deadline", why))
        self._end("lost", f"its process was killed, because {why}")

    def _stuck(self, number: int) -> None:
        """Not even a ping is answered: any environment with an in-flight call may be blocking the whole process."""
        call = self._calls.get(number)
        if call is not None and not self._hearing.done():
            self._end("deadline", f"{call.what} took more than {call.deadline_s:g} s, and its whole process is stuck")

    def _end(self, kind: FailureKind, why: str) -> None:
        if self._why:
            return
        self._why = why
        self._child.kill()
        calls, self._calls = self._calls, {}
        guilty = None if self._ending is None or kind != "crashed" else self._ending.handle
        suspects = 1 if guilty is not None else sum(not isinstance(call.request, ipc.EnvPing) for call in calls.values())
        for call in calls.values():
            if guilty is None:
                call.settle(EnvFailure(kind, why, suspects=max(1, suspects)))
            elif guilty == _place(call.request):
                call.settle(EnvFailure(kind, f"it {why}"))
            else:
                call.settle(EnvFailure("lost", f"another environment {why}"))
        while self._queue:
            self._queue.popleft().settle(EnvFailure("lost", why))
        self._on_end(self)

    async def _watch(self) -> None:
        """Waits until the process ends or closes its connection, and records the reason."""
        # waits: for as long as the process lives
        await asyncio.wait({self._hearing, self._child.exit}, return_when=asyncio.FIRST_COMPLETED)
        if self._child.exit.done():
            await asyncio.wait({self._hearing}, timeout=_GRACE_S)  # replies sent before the end count
        await asyncio.wait({self._child.exit}, timeout=_LAST_WORDS_S)
        self._tell_fault()
        self._end("lost" if self._exited_full() else "crashed", self._exit_reason())

    async def _receive(self) -> None:
        """Passes replies on until the connection ends."""
        with contextlib.suppress(Exception):  # the process ended, or something else wrote to its end of the connection
            while True:
                # waits: the caller has a deadline
                header = await self._child.reader.readexactly(HEADER.size)
                if header == FAULT:
                    self._fault = header
                    # waits: the process is about to end
                    while len(self._fault) < _FAULT_BYTES and (more := await self._child.reader.read(_FAULT_BYTES)):
                        self._fault += more
                    return
                (size,) = HEADER.unpack(header)
                if size > ipc.LIMIT_BYTES:
                    return
                # waits: the caller has a deadline
                number, result, seconds = ipc.RESULTS.read(await self._child.reader.readexactly(size))
                if number == ipc.BY_ITSELF:
                    self._receive_notice(result)
                    continue
                if not isinstance(result, ipc.Result) or not isinstance(seconds, float):
                    return
                self._calls.pop(number).settle((result, seconds))
                self._send_next()

    def _receive_notice(self, news: ipc.News) -> None:
        if isinstance(news, ipc.EnvSettled):
            self._threads[news.thread] = news.handle
        else:
            self._ending = news

    def _tell_fault(self) -> None:
        """Logs the output of the process's fault handler, and finds out from it which environment crashed."""
        if not self._fault:
            return
        words = faulty_part(self._fault)
        if self._log is None:
            sys.stderr.write(words.decode(errors="replace"))
        else:
            self._log.write(words)
        place = self._threads.get(faulty_thread(words) or 0)
        if place is not None and self._ending is None:
            self._ending = ipc.EnvEnding(place, f"had a fault{faulty_line(words)}")

    def _exit_reason(self) -> str:
        if self._exited_full():
            return "its process ended, because the environments in it had taken too much memory"
        ended = f"its process {self._child.exit_reason()}"
        return ended if self._ending is None else f"{self._ending.how}: {ended}"

    def _exited_full(self) -> bool:
        return self._child.exit.done() and self._child.exit.result() == EXIT_FULL


def _place(request: ipc.Request) -> int | None:
    """The environment that a request is for."""
    if isinstance(request, ipc.EnvLoad):
        return MAIN
    return None if isinstance(request, ipc.EnvPing | ipc.EnvSetUp) else request.handle


def _seen(reply: asyncio.Future[Reply]) -> None:
    """Retrieves the error of a call whose caller no longer waits, so that asyncio does not warn."""
    if not reply.cancelled():
        reply.exception()
