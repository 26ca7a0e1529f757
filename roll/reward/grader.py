"""The pool's handle of one grader process."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path

from roll.config.errors import RunError, UserError
from roll.process.bounded_log import LIMIT_BYTES
from roll.process.framing import HEADER, frame
from roll.process.managed_process import ManagedProcess
from roll.reward import ipc
from roll.reward.base import ScoreFailure
from roll.reward.grader_main import COMMAND
from roll.reward.reward_spec import RewardSpec

_GRACE_S = 0.2
_STATUS_S = 2.0
"""Time to wait for the exit status of a process that closed its connection: its reapers end after it."""


class Grader:
    """A process that has loaded the reward function and judges one job at a time.

    It is `usable` while it is alive and has no unanswered job: after an interrupted wait (deadline, crash, cancellation)
    it stays unusable, and its owner kills it.
    """

    def __init__(self, child: ManagedProcess) -> None:
        self._child = child
        self._awaits_answer = False
        self._part = ""

    @classmethod
    async def start(
        cls,
        source: RewardSpec,
        deadline_s: float,
        log: Path | None,
        memory_mb: int = 0,
        log_bytes: int = LIMIT_BYTES,
    ) -> Grader:
        """Starts a process that is ready for jobs. `UserError` or `RunError` says why it did not start."""
        grader = cls(await ManagedProcess.start(COMMAND, log, log_bytes=log_bytes))
        try:
            await grader._load(source, memory_mb, deadline_s)
        except BaseException:
            grader.kill()
            await asyncio.shield(grader.wait_exit())
            raise
        return grader

    @property
    def pid(self) -> int:
        """The process id, also the id of its process group."""
        return self._child.pid

    @property
    def usable(self) -> bool:
        """Whether it accepts jobs."""
        return not (self._awaits_answer or self._child.killed or self._child.exit.done())

    async def ask(self, job: bytes, deadline_s: float) -> ipc.GraderScored | ipc.GraderFailed:
        """The answer to a job; raises `ScoreFailure` if the process hangs or dies."""
        answer = await self._exchange(job, deadline_s)
        if not isinstance(answer, ipc.GraderScored | ipc.GraderFailed):
            self.kill()
            raise ScoreFailure("crashed", "the grader process sent something that is not an answer")
        if isinstance(answer, ipc.GraderFailed) and answer.is_last:
            self.kill()
        return answer

    def kill(self) -> None:
        """Ends the process and all its children, now. May be called again."""
        self._child.kill()

    async def wait_exit(self) -> None:
        """Waits until a killed process has ended."""
        await self._child.wait_exit()

    async def _load(self, source: RewardSpec, memory_mb: int, deadline_s: float) -> None:
        try:
            answer = await self._exchange(pickle.dumps(ipc.GraderSetUp(source, memory_mb)), deadline_s)
        except ScoreFailure as failure:
            if failure.kind == "deadline":
                raise RunError(f"loading reward {source.label!r} took more than {deadline_s:g} s") from None
            raise RunError(f"while loading reward {source.label!r}, {failure.reason}") from None
        if isinstance(answer, ipc.GraderRefused):
            if answer.users_fault:
                raise UserError(answer.reason)
            raise RunError(f"a grader process cannot load reward {source.label!r}: {answer.reason}")

    async def _exchange(self, payload: bytes, deadline_s: float) -> ipc.Answer:
        self._awaits_answer = True
        self._part = ""
        self._child.writer.write(frame(payload))
        answer = await self._receive(deadline_s)
        self._awaits_answer = False
        return answer

    async def _receive(self, deadline_s: float) -> ipc.Answer:
        reading = asyncio.create_task(self._read())
        try:
            await asyncio.wait({reading, self._child.exit}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                # An answer that has arrived counts. It may not have been read yet: the process ended right after it
                # answered, or the event loop was blocked for longer than the deadline.
                await asyncio.wait({reading}, timeout=_GRACE_S)
            if not reading.done() and not self._child.exit.done():
                raise ScoreFailure("deadline", f"no verdict after {deadline_s:g} s{self._where()}")
            answer = reading.result() if reading.done() else None
        finally:
            reading.cancel()
        if answer is None:
            raise ScoreFailure("crashed", await self._exit_reason())
        return answer

    async def _read(self) -> ipc.Answer | None:
        """The next answer, or None if none can come any more. Records which part is being judged."""
        while True:
            try:
                # waits: the caller has a deadline
                (size,) = HEADER.unpack(await self._child.reader.readexactly(HEADER.size))
                if size > ipc.LIMIT_BYTES:
                    return None
                # waits: the caller has a deadline
                answer: ipc.Answer = ipc.ANSWERS.read(await self._child.reader.readexactly(size))
            # the process ended, or something else wrote to its end of the connection: no answer can be trusted now
            except Exception:
                return None
            if not isinstance(answer, ipc.GraderEntered):
                return answer
            self._part = answer.part

    def _where(self) -> str:
        return f", in part {self._part!r}" if self._part else ""

    async def _exit_reason(self) -> str:
        await asyncio.wait({self._child.exit}, timeout=_STATUS_S)
        return f"the grader process {self._child.exit_reason()}{self._where()}"
