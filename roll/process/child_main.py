"""The child's side: it talks to the parent over a separate socket, so that user code may use stdin and stdout freely.

Output goes to the log; stdin is empty. The process ends with its parent, however the parent ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import TextIO, cast

from roll.config.secrets import KNOWN, print_no_secrets

REASON_CHARS = 500
DETAIL_CHARS = 4000
_PR_SET_PDEATHSIG = 1
_MAX_LOGGED = 20
_logged: set[str] = set()


def command(module: str) -> str:
    """The command that runs a module's `main` in a child: `python -P -c COMMAND socket_fd parent_pid *sys.path`.

    The child has exactly the parent's import path (`-m` would put the current folder first, where a user's `random.py`
    would hide the standard module).
    """
    return f"import sys; sys.path[:] = sys.argv[3:]; from {module} import main; main()"


def connect(*, killed_first: bool = True) -> socket.socket:
    """Connects to the parent, whose socket and process id are on the command line. `killed_first`: when memory runs out,
    the kernel kills this process before others."""
    _die_with_parent(int(sys.argv[2]))
    if killed_first:
        _be_killed_first_when_out_of_memory()
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    cast(TextIO, sys.stdout).reconfigure(line_buffering=True)  # type: ignore[attr-defined]
    print_no_secrets()
    return connection


def reason(error: BaseException) -> str:
    """One line: the error and where it was raised, preceded by its root cause if it has one."""
    root = _root_cause(error)
    return _describe(error) if root is error else f"{_describe(root)}, then {_describe(error)}"


def _root_cause(error: BaseException) -> BaseException:
    seen = {id(error)}
    while True:
        cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if cause is None or id(cause) in seen:
            return error
        seen.add(id(cause))
        error = cause


def _describe(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    except Exception:
        text = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return " ".join(KNOWN.redact(text)[:REASON_CHARS].split()) + where


def detail(error: BaseException) -> str:
    """The end of the traceback."""
    try:
        return KNOWN.redact("".join(traceback.format_exception(error)))[-DETAIL_CHARS:]
    except Exception:
        return ""


def log_failure(failure: str) -> None:
    """Writes a failure's detail to this process's log: each distinct one once, and only the first `_MAX_LOGGED`."""
    if failure and failure not in _logged and len(_logged) < _MAX_LOGGED:
        _logged.add(failure)
        print(failure.rstrip(), file=sys.stderr, flush=True)


def _die_with_parent(parent_pid: int) -> None:
    """Makes this process end when its parent ends, whatever user code is doing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    else:
        threading.Thread(target=_watch_parent, args=(parent_pid,), daemon=True).start()
    if os.getppid() != parent_pid:  # the parent ended before the call above
        os._exit(0)


def _watch_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def _be_killed_first_when_out_of_memory() -> None:
    """Makes the kernel's OOM killer prefer this process over the trainer: its work can be repeated."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
