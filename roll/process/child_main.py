"""The child's side: it speaks over a socket of its own, so that users' code may print and read as it likes.

What is printed goes to the log; the standard input is empty. The process ends with its parent, however that ends.
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
_MOST_TOLD = 20
_told: set[str] = set()


def command(module: str) -> str:
    """What runs a module's `main` in a child: `python -P -c COMMAND socket_fd parent_pid *sys.path`.

    The process imports what the parent's would, and only that (`-m` would put the current folder first, where a user's
    `random.py` would hide the standard one).
    """
    return f"import sys; sys.path[:] = sys.argv[3:]; from {module} import main; main()"


def connect(*, killed_first: bool = True) -> socket.socket:
    """The connection to the parent, whose socket and process id are on the command line. `killed_first`: when memory runs
    out, the system ends this process before others."""
    _die_with(int(sys.argv[2]))
    if killed_first:
        _be_killed_first_when_memory_runs_out()
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    cast(TextIO, sys.stdout).reconfigure(line_buffering=True)  # type: ignore[attr-defined]
    print_no_secrets()
    return connection


def reason(error: BaseException) -> str:
    """One line: the error, and where it was raised; what it came of before it, if it came of another."""
    first = _first_cause(error)
    return _line(error) if first is error else f"{_line(first)}, then {_line(error)}"


def _first_cause(error: BaseException) -> BaseException:
    seen = {id(error)}
    while True:
        before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if before is None or id(before) in seen:
            return error
        seen.add(id(before))
        error = before


def _line(error: BaseException) -> str:
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


def tell(failure: str) -> None:
    """Writes a failure's detail to this process's log, each once, and the first of them only."""
    if failure and failure not in _told and len(_told) < _MOST_TOLD:
        _told.add(failure)
        print(failure.rstrip(), file=sys.stderr, flush=True)


def _die_with(parent_pid: int) -> None:
    """End this process when its parent ends, whatever users' code is doing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent_pid,), daemon=True).start()
    if os.getppid() != parent_pid:  # it ended before the line above
        os._exit(0)


def _watch(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def _be_killed_first_when_memory_runs_out() -> None:
    """Rather this process than the trainer: what it did can be done again."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
