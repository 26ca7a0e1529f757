"""A handle to a process of this machine, for killing it."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_LOOK_S = 0.01


@dataclass(frozen=True)
class PidHandle:
    """A process, identified by its pid and start time, because the kernel reuses pids.

    Without /proc a process counts as ended.
    """

    pid: int
    began: str
    """Its start time in kernel clock ticks, as in /proc."""

    @classmethod
    def of(cls, pid: int) -> PidHandle:
        return cls(pid, _began(pid) or "")

    @property
    def is_there(self) -> bool:
        return _began(self.pid) == self.began

    def end(self, deadline_s: float) -> bool:
        """Kills the process, also if it is stopped; returns whether it ended within the deadline. Blocks."""
        until_s = time.monotonic() + deadline_s
        while self.is_there:
            if time.monotonic() > until_s:
                return False
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(_LOOK_S)
        return True


def _began(pid: int) -> str | None:
    """The start time of a process; None if there is none, or only a zombie."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    threads, began = fields[16], fields[18]
    # A process whose main thread has exited still holds its memory and devices while other threads run.
    return None if state in "ZX" and int(threads) <= 1 else began
