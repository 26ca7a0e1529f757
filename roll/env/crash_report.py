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

FAULT = b"Fatal Py"
"""The first bytes of the fault handler's output, in place of a frame header."""
MAIN = -1
"""Instead of an environment: the code that is being imported."""
current: contextvars.ContextVar[int | None] = contextvars.ContextVar("place", default=None)
"""The environment whose code is running."""

_DEADLY = {signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTERM}
_THREAD = re.compile(rb"Current thread 0x([0-9a-f]+)")
_FRAME = re.compile(rb'File "([^"]+)", line (\d+)')


def confess_by(tell: Callable[[int, str], None]) -> None:
    """From now on, before an environment ends this process, calls `tell` with the environment and what it is about to
    do."""
    pid = os.getpid()

    def before(how: str) -> None:
        place = current.get(None)
        if place is not None and os.getpid() == pid:
            tell(place, how)

    def wrapped(function: Callable[..., Any], how: Callable[..., str]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            said = how(*args, **kwargs)
            if said:
                before(said)
            return function(*args, **kwargs)

        return call

    def killed(target: int, number: int) -> str:
        own = target in (0, pid, -pid)
        return f"sent itself {signal.Signals(number).name}" if own and _is_deadly(number) else ""

    os._exit = wrapped(os._exit, lambda status: f"called os._exit({status})")
    os.abort = wrapped(os.abort, lambda: "called os.abort()")
    os.kill = wrapped(os.kill, killed)
    os.killpg = wrapped(os.killpg, killed)
    signal.raise_signal = wrapped(signal.raise_signal, lambda number: killed(pid, number))


def _is_deadly(number: int) -> bool:
    try:
        return number in _DEADLY and (number == signal.SIGKILL or signal.getsignal(number) == signal.SIG_DFL)
    except (TypeError, ValueError):
        return False


def faulty_part(words: bytes) -> bytes:
    """The fault handler's output about the crashed thread, without the other threads."""
    head, *parts = words.split(b"\n\n")
    own = [part for part in parts if _THREAD.match(part)]
    return b"\n\n".join([head, *own]).rstrip() + b"\n" if own else words


def faulty_thread(words: bytes) -> int | None:
    """The crashed thread in the fault handler's output."""
    found = _THREAD.search(words)
    return None if found is None else int(found[1], 16)


def faulty_line(words: bytes) -> str:
    """The file and line of the crash, for a message."""
    found = _FRAME.search(words)
    return "" if found is None else f" ({os.path.basename(found[1].decode(errors='replace'))}:{found[2].decode()})"
