"""The first process of a sandbox with processes of its own: it reaps what ends, and ends as the program does.

It has the program's user, so the program could write into its memory were it not hidden; and code that got into it all
the same would have the program's limits. It loads as little as it can: every execution waits for that.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # loads at once, signal does not
import os

from roll.sandbox.inside.program import set_limits

TYPE_CHECKING = False  # without importing typing, which takes a while
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

SIGNALLED = 128
"""What is added to a signal's number to make an exit status."""
_PR_SET_DUMPABLE = 4


def under_bubblewrap(config: dict[str, Any], program: Callable[[dict[str, Any]], None]) -> None:
    """Runs the program in a child, as bubblewrap's `--as-pid-1` has this process be the first."""
    limits = config["rlimits"]
    set_limits({name: value for name, value in limits.items() if name != "RLIMIT_NPROC"})  # or it could not fork
    child = fork_hidden()
    if child:
        set_limits(limits)
        for fd in (0, 1, 2, config["payload"], config["status"], *config["joins"]):
            os.close(fd)
        end_as(child)
    if config["filter"]:
        from roll.sandbox.inside import kernel  # it takes a while to load

        kernel.filter_calls(config["filter"])
    program(config)


def fork_hidden() -> int:
    """A fork whose parent no process of the same user can look into, write to, or interrupt. Never is it otherwise."""
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    set_dumpable(0)
    child = os.fork()
    if not child:
        set_dumpable(1)
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    return child


def end_as(child: int) -> NoReturn:
    """Reaps whatever ends until the child has, and ends as it did."""
    os._exit(reap_until(child))


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
