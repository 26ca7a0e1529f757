"""The processes of a vLLM engine: they end with the process that started the engine, however that ends, and do not hear a
terminal's Ctrl-C, which ends a run after its step.

For the first a keeper waits beside the owner and, should that end, ends what has the engine's mark in its environment:
vLLM outlives its owner otherwise, and keeps the device. For the second they are started with the signal blocked, which
every process inherits from the one that starts it.

The keeper runs this file alone, so it imports nothing of ROLL.
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
"""Variable of the engine's processes: the process that started them and a name of the engine's own."""
_LOOKS = 10
_LOOK_S = 0.5
"""A process that is ended may just be starting another."""


class _Interrupted(BaseException):
    """Ctrl-C, where a KeyboardInterrupt would not get through."""


@contextmanager
def deaf_to_ctrl_c() -> Iterator[None]:
    """What this thread starts in here does not hear Ctrl-C, nor does what that starts. This process does, if a moment
    later: another thread hears it meanwhile, and the main one handles it when it next comes back to Python. It then ends
    what is done in here: vLLM would take a KeyboardInterrupt for its own and go on to wait, so it gets another exception.
    """
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

    def hear_again() -> None:
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
            hear_again()
            if handles:
                signal.signal(signal.SIGINT, handler)
    except _Interrupted:  # it comes once, but perhaps in the middle of the lines above
        hear_again()
        raise KeyboardInterrupt from None


class OrphanReaper:
    """Of one engine's processes, which are started with its `mark`."""

    def __init__(self) -> None:
        _start_tracker()
        self._mark = f"{os.getpid()}:{uuid.uuid4().hex}"
        command = [sys.executable, "-S", __file__, self._mark]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)

    @property
    def environment(self) -> dict[str, str]:
        """Variables to start the engine's processes with. vLLM names its processes, and a process that is named
        overwrites what can be read of its environment unless it is told not to."""
        return {MARK: self._mark, "SPT_NOENV": "1"}

    def close(self) -> None:
        """The engine has ended, or shall: none of its processes is left."""
        self._process.kill()
        # waits: it is killed
        self._process.wait()
        end(self._mark)


def _start_tracker() -> None:
    """The owner's tracker of shared memory, which else would be started with the engine, and have its mark. It removes
    what an engine that is ended leaves, and need not say so at the end of every run."""
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (before, "ignore:resource_tracker")))
    try:
        resource_tracker.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before


def end(mark: str) -> None:
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is somebody else's
            variables = (place / "environ").read_bytes().split(b"\0")
            if f"{MARK}={mark}".encode() in variables and int(place.name) != os.getpid():
                os.kill(int(place.name), signal.SIGKILL)


def keep(mark: str) -> None:
    """Waits for the owner's end, then ends the engine's processes."""
    with suppress(ProcessLookupError):  # it has ended already
        select.select([os.pidfd_open(int(mark.partition(":")[0]))], [], [])
    for _ in range(_LOOKS):
        end(mark)
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    keep(sys.argv[1])
