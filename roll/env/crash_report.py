"""Crash reports: finds out which environment ended an environment process, as far as that is possible.

Calls of `os._exit`, `os.abort`, or a deadly signal to the own process are noticed before they take effect. For a fault in
native code, the interpreter's fault handler writes the thread right after the last frame of the connection. If another
process, the kernel's OOM killer, or a thread that an environment started ends the process, the environment is unknown.
"""

from __future__ import annotations

import contextvars
import os
import re
import signal
from collections.abc import Callable
from typing import Any

FAULT_HEADER = b"Fatal Py"
"""The first bytes of the fault handler's output, in place of a frame header."""
MAIN = -1
"""Instead of an environment: the code that is being imported."""
current_env: contextvars.ContextVar[int | None] = contextvars.ContextVar("env_handle", default=None)
"""The environment whose code is running."""

_DEADLY = {signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTERM}
_THREAD = re.compile(rb"Current thread 0x([0-9a-f]+)")
_FRAME = re.compile(rb'File "([^"]+)", line (\d+)')


def report_exits(report: Callable[[int, str], None]) -> None:
    """From now on, before an environment ends this process, calls `report` with the environment and what it is about to
    do."""
    pid = os.getpid()

    def report_env(how: str) -> None:
        handle = current_env.get(None)
        if handle is not None and os.getpid() == pid:
            report(handle, how)

    def wrapped(function: Callable[..., Any], how: Callable[..., str]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            description = how(*args, **kwargs)
            if description:
                report_env(description)
            return function(*args, **kwargs)

        return call

    def describe_kill(target: int, number: int) -> str:
        is_self = target in (0, pid, -pid)
        return f"sent itself {signal.Signals(number).name}" if is_self and _is_deadly(number) else ""

    os._exit = wrapped(os._exit, lambda status: f"called os._exit({status})")
    os.abort = wrapped(os.abort, lambda: "called os.abort()")
    os.kill = wrapped(os.kill, describe_kill)
    os.killpg = wrapped(os.killpg, describe_kill)
    signal.raise_signal = wrapped(signal.raise_signal, lambda number: describe_kill(pid, number))


def _is_deadly(number: int) -> bool:
    try:
        return number in _DEADLY and (number == signal.SIGKILL or signal.getsignal(number) == signal.SIG_DFL)
    except (TypeError, ValueError):
        return False


def crashed_thread_output(output: bytes) -> bytes:
    """The fault handler's output about the crashed thread, without the other threads."""
    head, *parts = output.split(b"\n\n")
    crashed = [part for part in parts if _THREAD.match(part)]
    return b"\n\n".join([head, *crashed]).rstrip() + b"\n" if crashed else output


def crashed_thread_id(output: bytes) -> int | None:
    """The crashed thread in the fault handler's output."""
    found = _THREAD.search(output)
    return None if found is None else int(found[1], 16)


def crash_location(output: bytes) -> str:
    """The file and line of the crash, for a message."""
    found = _FRAME.search(output)
    return "" if found is None else f" ({os.path.basename(found[1].decode(errors='replace'))}:{found[2].decode()})"
