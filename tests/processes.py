"""What tests ask about processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path


def state(pid: int) -> str:
    """Of a process, as the kernel says it; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def alive(pid: int) -> bool:
    """Whether it runs or may run again: one that has left only its exit status is gone."""
    return state(pid) not in ("", "Z")


def eventually(holds: Callable[[], bool], within_s: float = 60) -> bool:
    until = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def gone(pid: int, within_s: float = 60) -> bool:
    return eventually(lambda: not alive(pid), within_s)


def printed_pids(program: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A running Python program, and the processes that it names in its first line."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    with process.stdout:
        return process, [int(pid) for pid in process.stdout.readline().split()]
