"""A grader process: loads the reward function, then judges one attempt at a time until the pool goes away.

The pool speaks over a socket of its own, so that the function may print and read as it likes: what it prints goes to
the log, its standard input is empty. The function runs in the main thread, where time-outs by signal work. This module
imports little, because every replacement of a killed process pays for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from typing import BinaryIO, TextIO, cast

from roll.config.errors import UserError
from roll.reward.base import RewardFn, normalise
from roll.reward.resolve import RewardSource
from roll.reward.wire import Answer, Failed, Ready, Refused, Scored, read_payload, write_answer

COMMAND = "import sys; sys.path[:] = sys.argv[3:]; from roll.reward.process import main; main()"
"""Run as `python -P -c COMMAND socket_fd pool_pid *sys.path`: the process imports what the pool's would, and only that
(`-m` would put the current folder first, where a user's `random.py` would hide the standard one)."""

_PR_SET_PDEATHSIG = 1
_REASON_CHARS = 500
_DETAIL_CHARS = 4000


def main() -> None:
    """Serve the pool whose socket and process id are on the command line."""
    _die_with(int(sys.argv[2]))
    _be_killed_first_when_memory_runs_out()
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    cast(TextIO, sys.stdout).reconfigure(line_buffering=True)  # type: ignore[attr-defined]
    with contextlib.suppress(ConnectionError):
        serve(cast(BinaryIO, connection.makefile("rwb")))
    os._exit(0)  # threads and exit handlers of the function's do not hold the process up


def serve(stream: BinaryIO) -> None:
    """Load the function the first frame names, then answer jobs until the other side has gone."""
    payload = read_payload(stream)
    if payload is None:
        return
    try:
        source: RewardSource = pickle.loads(payload)
        function = source.load()
    except BaseException as error:
        write_answer(stream, _refusal(error))
        return
    write_answer(stream, Ready())
    pid = os.getpid()
    while (job := read_payload(stream)) is not None:
        answer = judge(function, job)
        if os.getpid() != pid:  # the function forked, and its copy of this process came back from it
            return
        write_answer(stream, answer)


def judge(function: RewardFn, job: bytes) -> Answer:
    """What the function makes of a job, whatever it raises or returns."""
    try:
        task, response = pickle.loads(job)
    except BaseException as error:
        return Failed("raised", f"the task cannot be read in the grader process: {_reason(error)}", _detail(error))
    started = time.perf_counter()
    try:
        result = function(task, response)
    except BaseException as error:  # SystemExit too: a grader that calls sys.exit() has raised
        return Failed("raised", _reason(error), _detail(error))
    try:
        return Scored(normalise(result), time.perf_counter() - started)
    except ValueError as error:
        return Failed("invalid", str(error)[:_REASON_CHARS])
    except BaseException as error:
        return Failed("invalid", f"the reward function returned what cannot be read: {_reason(error)}", _detail(error))


def _refusal(error: BaseException) -> Refused:
    users_fault = isinstance(error, UserError)
    return Refused(str(error) if users_fault else _reason(error), users_fault)


def _reason(error: BaseException) -> str:
    """One line: the error, and where it was raised."""
    try:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    except Exception:
        text = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return " ".join(text[:_REASON_CHARS].split()) + where


def _detail(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))[-_DETAIL_CHARS:]
    except Exception:
        return ""


def _die_with(pool_pid: int) -> None:
    """End this process when the pool's ends, however that ends and whatever the function is doing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(pool_pid,), daemon=True).start()
    if os.getppid() != pool_pid:  # it ended before the line above
        os._exit(0)


def _watch(pool_pid: int) -> None:
    while os.getppid() == pool_pid:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def _be_killed_first_when_memory_runs_out() -> None:
    """Rather this process than the trainer: a verdict can be retried."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
