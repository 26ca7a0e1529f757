"""The parent's side of a child."""

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

_log = logging.getLogger(__name__)

_REAP_S = 5.0


class Child:
    """A process and the connection to it.

    It leads a process group, so that killing it kills what users' code started; when it ends by itself, they end too.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self.reader = reader
        self.writer = writer
        # waits: for as long as the process lives
        self.exit = asyncio.create_task(process.wait())
        """Ends with the process."""
        self.killed = False
        # At once, not when someone notices: later the group's id may be another's.
        self.exit.add_done_callback(lambda _: self.kill())

    @classmethod
    async def start(cls, command: str, log: Path | None, environment: Mapping[str, str] | None = None) -> Child:
        """Runs a command of `inside.command`. What it prints goes to the file `log`, or to standard error."""
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
                *(sys.executable, "-P", "-c", command, str(theirs.fileno()), str(os.getpid()), *sys.path),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )
            on_error.pop_all()
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        """The process's id, also its group's."""
        return self._process.pid

    def kill(self) -> None:
        """Ends the process and all it started, now. Safe to repeat."""
        if not self.killed:
            self.killed = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def gone(self) -> None:
        """Waits for a killed process's end, and closes the connection."""
        await asyncio.wait({self.exit}, timeout=_REAP_S)
        if not self.exit.done():
            _log.warning("process %d is still there %g s after it was killed", self.pid, _REAP_S)
            self.exit.cancel()
        self.writer.transport.abort()

    def obituary(self) -> str:
        """What became of it, after `the process`."""
        if not self.exit.done():
            return "broke its connection"
        status = self.exit.result()
        if status >= 0:
            return f"exited with status {status}"
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-status).name}"
        return f"was killed by signal {-status}"
