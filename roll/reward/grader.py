"""One grader process, seen from the pool."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import socket
import sys
from pathlib import Path

from roll.config.errors import RunError, UserError
from roll.reward import wire
from roll.reward.base import ScoreFailure
from roll.reward.process import COMMAND
from roll.reward.resolve import RewardSource

_log = logging.getLogger(__name__)

_GRACE_S = 0.2
_REAP_S = 5.0


class Grader:
    """A process that has loaded the reward function and judges one job at a time.

    It leads a process group, so that killing it kills what the function started; when it ends by itself, they end too.
    It is `usable` while it lives and owes no answer: a wait that was cut short (deadline, crash, cancellation) leaves
    it unusable for good, and its owner kills it.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        # waits: for as long as the process lives
        self._exit = asyncio.create_task(process.wait())
        self._owes_answer = False
        self._killed = False
        # At once, not when someone notices: later the group's id may be another's.
        self._exit.add_done_callback(lambda _: self.kill())

    @classmethod
    async def start(cls, source: RewardSource, deadline_s: float, log: Path | None) -> Grader:
        """A process that is ready for jobs. `UserError` or `RunError` says why there is none."""
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as closing:
            closing.callback(theirs.close)
            on_error = closing.enter_context(contextlib.ExitStack())
            on_error.callback(ours.close)
            # waits: a socket that is connected
            reader, writer = await asyncio.open_connection(sock=ours)
            on_error.callback(writer.transport.abort)
            output = 2 if log is None else closing.enter_context(open(log, "ab"))  # noqa: ASYNC230
            # waits: the kernel answers
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-c", COMMAND, str(theirs.fileno()), str(os.getpid()), *sys.path),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
            on_error.pop_all()
        grader = cls(process, reader, writer)
        try:
            await grader._load(source, deadline_s)
        except BaseException:
            grader.kill()
            await asyncio.shield(grader.gone())
            raise
        return grader

    @property
    def pid(self) -> int:
        """The process's id, also its group's."""
        return self._process.pid

    @property
    def usable(self) -> bool:
        """Whether it can be given a job."""
        return not (self._owes_answer or self._killed or self._exit.done())

    async def ask(self, job: bytes, deadline_s: float) -> wire.Scored | wire.Failed:
        """The answer to a job; `ScoreFailure` if the process hangs or dies over it."""
        answer = await self._exchange(job, deadline_s)
        if not isinstance(answer, wire.Scored | wire.Failed):
            self.kill()
            raise ScoreFailure("crashed", "the grader process sent something that is not an answer")
        return answer

    def kill(self) -> None:
        """End the process and all it started, now. Safe to repeat."""
        if not self._killed:
            self._killed = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def gone(self) -> None:
        """Wait for a killed process's end."""
        await asyncio.wait({self._exit}, timeout=_REAP_S)
        if not self._exit.done():
            _log.warning("grader process %d is still there %g s after it was killed", self.pid, _REAP_S)
            self._exit.cancel()
        self._writer.transport.abort()

    async def _load(self, source: RewardSource, deadline_s: float) -> None:
        try:
            answer = await self._exchange(pickle.dumps(source), deadline_s)
        except ScoreFailure as failure:
            if failure.kind == "deadline":
                raise RunError(f"loading reward {source.label!r} took more than {deadline_s:g} s") from None
            raise RunError(f"while loading reward {source.label!r}, {failure.reason}") from None
        if isinstance(answer, wire.Refused):
            if answer.users_fault:
                raise UserError(answer.reason)
            raise RunError(f"a grader process cannot load reward {source.label!r}: {answer.reason}")

    async def _exchange(self, payload: bytes, deadline_s: float) -> wire.Answer:
        self._owes_answer = True
        self._writer.write(wire.frame(payload))
        answer = await self._receive(deadline_s)
        self._owes_answer = False
        return answer

    async def _receive(self, deadline_s: float) -> wire.Answer:
        reading = asyncio.create_task(self._read())
        try:
            await asyncio.wait({reading, self._exit}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                # What has arrived counts. It may not have been read yet: the process ended right after it answered, or
                # the event loop was held up for longer than the deadline.
                await asyncio.wait({reading}, timeout=_GRACE_S)
            if not reading.done() and not self._exit.done():
                raise ScoreFailure("deadline", f"no verdict after {deadline_s:g} s")
            answer = reading.result() if reading.done() else None
        finally:
            reading.cancel()
        if answer is None:
            raise ScoreFailure("crashed", await self._obituary())
        return answer

    async def _read(self) -> wire.Answer | None:
        """The next answer, or None if none can come any more."""
        try:
            # waits: who asks has a deadline
            (size,) = wire.HEADER.unpack(await self._reader.readexactly(wire.HEADER.size))
            # waits: who asks has a deadline
            answer: wire.Answer = pickle.loads(await self._reader.readexactly(size))
        except Exception:  # it ended, or something wrote to its end of the connection: no answer can be trusted now
            return None
        return answer

    async def _obituary(self) -> str:
        await asyncio.wait({self._exit}, timeout=_GRACE_S)
        if not self._exit.done():
            return "the grader process broke its connection"
        status = self._exit.result()
        if status >= 0:
            return f"the grader process exited with status {status}"
        with contextlib.suppress(ValueError):
            return f"the grader process was killed by {signal.Signals(-status).name}"
        return f"the grader process was killed by signal {-status}"
