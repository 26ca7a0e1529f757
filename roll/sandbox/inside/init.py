"""A process above the program: it reaps what ends until the program has.

It may have the program's user: so that no program writes into its memory, it is hidden.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # loads at once, signal does not
import os

TYPE_CHECKING = False  # without importing typing, which takes a while
if TYPE_CHECKING:
    from typing import Any

SIGNALLED = 128
"""What is added to a signal's number to make an exit status."""
_PR_SET_DUMPABLE = 4


def fork_hidden() -> int:
    """A fork whose parent no process of the same user can look into, write to, or interrupt. Never is it otherwise."""
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    set_dumpable(0)
    child = os.fork()
    if not child:
        set_dumpable(1)
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    return child


def reap_until(child: int) -> int:
    """Reaps whatever ends until the child has; its exit status."""
    while True:
        # waits: the run ends this process when its time is up
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else SIGNALLED + os.WTERMSIG(status)


def set_dumpable(value: int) -> None:
    """Whether processes of the same user may trace this one, and read and write its memory: 1 or 0."""
    try:
        import _ctypes

        c: Any = _ctypes  # it loads in a third of the time that ctypes takes
        result = c.call_function(c.dlsym(c.dlopen(None, 0), "prctl"), (_PR_SET_DUMPABLE, value, 0, 0, 0))
    except (ImportError, AttributeError):
        import ctypes

        result = ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, value, 0, 0, 0)
    if result < 0:
        raise OSError("the first process cannot be hidden")
