"""A process of this machine that must end."""

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
    """A process, told apart from a later one with the same number by the moment it began.

    Where the system does not tell (no /proc), a process counts as gone.
    """

    pid: int
    began: str
    """The kernel's clock when it began."""

    @classmethod
    def of(cls, pid: int) -> PidHandle:
        return cls(pid, _began(pid) or "")

    @property
    def is_there(self) -> bool:
        return _began(self.pid) == self.began

    def end(self, deadline_s: float) -> bool:
        """Kills it, also if it is stopped, and says whether it was gone in time. Blocks."""
        until_s = time.monotonic() + deadline_s
        while self.is_there:
            if time.monotonic() > until_s:
                return False
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(_LOOK_S)
        return True


def _began(pid: int) -> str | None:
    """When the process began; None if there is none, or nothing but its exit status."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    threads, began = fields[16], fields[18]
    # A first thread that has ended while others still do holds the process's memory and devices.
    return None if state in "ZX" and int(threads) <= 1 else began
