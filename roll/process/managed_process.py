"""The parent's side of a child process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from roll.process.bounded_log import LIMIT_BYTES
from roll.process.framing import HEADER
from roll.process.subreaper import PARENT_ENDED, program

_log = logging.getLogger(__name__)

_REAP_S = 5.0


def _private(path: str, flags: int) -> int:
    """Creates a log readable by its owner only; its writer opens it to others if the run's folder is readable by them."""
    return os.open(path, flags, 0o600)


class ManagedProcess:
    """A child process and the connection to it.

    It leads a process group and has a subreaper (`roll.process.subreaper`): when the child is killed or ends by itself,
    or this process ends, all processes that user code started are killed, daemons included."""

    def __init__(
        self, subreaper: asyncio.subprocess.Process, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.pid = pid
        """Process id of the child, also the id of its process group."""
        self.reader = reader
        self.writer = writer
        # waits: for as long as the process lives
        self.exit = asyncio.create_task(subreaper.wait())
        """Done once the child and all processes it started have ended."""
        self.killed = False

    @classmethod
    async def start(
        cls,
        command: str,
        log: Path | None,
        environment: Mapping[str, str] | None = None,
        log_bytes: int = LIMIT_BYTES,
    ) -> ManagedProcess:
        """Runs a command of `child_main.command`. Its output goes to the file `log`, of at most `log_bytes`, or to
        stderr."""
        parent_socket, child_socket = socket.socketpair()
        with contextlib.ExitStack() as closing:
            closing.callback(child_socket.close)
            on_error = closing.enter_context(contextlib.ExitStack())
            on_error.callback(parent_socket.close)
            # waits: a socket that is connected
            reader, writer = await asyncio.open_connection(sock=parent_socket)
            on_error.callback(writer.transport.abort)
            output = 2 if log is None else closing.enter_context(open(log, "ab", opener=_private))  # noqa: ASYNC230
            arguments = ("" if log is None else str(log), str(log_bytes), str(os.getpid()), str(child_socket.fileno()))
            # waits: the kernel answers
            subreaper = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", program(), *arguments, sys.executable, command, *sys.path),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(child_socket.fileno(),),
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )
            child_socket.close()
            try:
                # waits: the subreaper sends the child's process id at once, or has ended
                (pid,) = HEADER.unpack(await reader.readexactly(HEADER.size))
            except BaseException as error:
                await asyncio.shield(_end_subreaper(subreaper))
                if isinstance(error, EOFError | OSError):
                    raise ChildProcessError("a process could not be started: its subreaper has ended") from error
                raise
            on_error.pop_all()
        return cls(subreaper, pid, reader, writer)

    def kill(self) -> None:
        """Kills the child and all processes it started. Idempotent."""
        if not self.killed and not self.exit.done():
            self.killed = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def wait_exit(self) -> None:
        """Waits until a killed child has ended, and closes the connection."""
        await asyncio.wait({self.exit}, timeout=_REAP_S)
        if not self.exit.done():
            _log.warning("process %d is still running %g s after it was killed", self.pid, _REAP_S)
            self.exit.cancel()
        self.writer.transport.abort()

    def exit_reason(self) -> str:
        """How the process ended, as a phrase that follows "the process"."""
        if not self.exit.done():
            return "broke its connection"
        status = self.exit.result()
        if status >= 0:
            return f"exited with status {status}"
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-status).name}"
        return f"was killed by signal {-status}"


async def _end_subreaper(subreaper: asyncio.subprocess.Process) -> None:
    """Ends a subreaper and all processes that it has started."""
    for number in (PARENT_ENDED, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            subreaper.send_signal(number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(subreaper.wait(), _REAP_S)
            return
