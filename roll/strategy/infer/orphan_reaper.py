"""Manages the processes of a vLLM engine: they end with the process that started the engine, however that ends, and do
not receive a terminal's Ctrl-C, which is meant to end the run after its current step.

For the first, a reaper process waits for the owner to end, then kills the processes that have the engine's mark in their
environment: otherwise vLLM outlives its owner and keeps the device. For the second, the processes are started with the
signal blocked, which child processes inherit.

The reaper process runs this file alone, so it imports nothing of ROLL.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType

MARK = "ROLL_VLLM_ENGINE"
"""Environment variable of the engine's processes: the pid of the process that started them and a unique name of the
engine."""
_KILL_ROUNDS = 10
_KILL_INTERVAL_S = 0.5
"""Repeated, because a process that is killed may just have started another."""


class _Interrupted(BaseException):
    """Ctrl-C, for code that would swallow a KeyboardInterrupt."""


@contextmanager
def shield_sigint() -> Iterator[None]:
    """Processes that this thread starts in the block do not receive Ctrl-C, nor do their children. This process does,
    with a short delay: another thread receives it, and the main thread handles it when it returns to Python code. That
    ends the block: vLLM would take a KeyboardInterrupt for its own and continue to wait, so it gets another exception."""
    done = threading.Event()
    threading.Thread(target=done.wait, name="hears Ctrl-C", daemon=True).start()
    handler = signal.getsignal(signal.SIGINT)
    handles = threading.current_thread() is threading.main_thread() and callable(handler)

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, handler)
        assert callable(handler)
        with suppress(KeyboardInterrupt):
            handler(number, frame)
        raise _Interrupted

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        done.set()

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        try:
            if handles:
                signal.signal(signal.SIGINT, interrupt)
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            yield
        finally:
            unblock()
            if handles:
                signal.signal(signal.SIGINT, handler)
    except _Interrupted:  # it comes once, but perhaps in the middle of the lines above
        unblock()
        raise KeyboardInterrupt from None


class OrphanReaper:
    """Reaps the processes of one engine, which are started with its `mark`."""

    def __init__(self) -> None:
        _start_tracker()
        self._mark = f"{os.getpid()}:{uuid.uuid4().hex}"
        command = [sys.executable, "-S", __file__, self._mark]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)

    @property
    def environment(self) -> dict[str, str]:
        """Variables to start the engine's processes with. vLLM renames its processes, which overwrites the readable copy
        of their environment unless `SPT_NOENV` is set."""
        return {MARK: self._mark, "SPT_NOENV": "1"}

    def close(self) -> None:
        """Kills all remaining processes of the engine."""
        self._process.kill()
        # waits: it was killed
        self._process.wait()
        kill_marked(self._mark)


def _start_tracker() -> None:
    """Starts the owner's tracker of shared memory now: otherwise it would be started with the engine, and have its mark.
    It removes the shared memory that a killed engine leaves, without a warning at the end of every run."""
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (before, "ignore:resource_tracker")))
    try:
        resource_tracker.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before


def kill_marked(mark: str) -> None:
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            variables = (process / "environ").read_bytes().split(b"\0")
            if f"{MARK}={mark}".encode() in variables and int(process.name) != os.getpid():
                os.kill(int(process.name), signal.SIGKILL)


def wait_and_kill(mark: str) -> None:
    """Waits until the owner has ended, then kills the engine's processes."""
    with suppress(ProcessLookupError):  # it has ended already
        select.select([os.pidfd_open(int(mark.partition(":")[0]))], [], [])
    for _ in range(_KILL_ROUNDS):
        kill_marked(mark)
        time.sleep(_KILL_INTERVAL_S)


if __name__ == "__main__":
    wait_and_kill(sys.argv[1])
