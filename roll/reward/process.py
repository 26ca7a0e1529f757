"""A grader process: loads the reward function, then judges one attempt at a time until the pool goes away.

The function runs in the main thread, where time-outs by signal work. This module imports little, because every
replacement of a killed process pays for it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from typing import BinaryIO, cast

from roll.child.frames import read_payload
from roll.child.inside import REASON_CHARS, command, connect, detail, reason
from roll.config.errors import UserError
from roll.reward.base import PartFailure, RewardFn, normalise
from roll.reward.resolve import RewardSource
from roll.reward.wire import Answer, Failed, Ready, Refused, Scored, write_answer

COMMAND = command("roll.reward.process")


def main() -> None:
    """Serve the pool that started this process."""
    with contextlib.suppress(ConnectionError):
        serve(cast(BinaryIO, connect().makefile("rwb")))
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
        return Failed("raised", f"the task cannot be read in the grader process: {reason(error)}", detail(error))
    started = time.perf_counter()
    try:
        result = function(task, response)
    except PartFailure as failure:
        return _part_failed(failure)
    except BaseException as error:  # SystemExit too: a grader that calls sys.exit() has raised
        return Failed("raised", reason(error), detail(error))
    try:
        return Scored(normalise(result), time.perf_counter() - started)
    except ValueError as error:
        return Failed("invalid", str(error)[:REASON_CHARS])
    except BaseException as error:
        return Failed("invalid", f"the reward function returned what cannot be read: {reason(error)}", detail(error))


def _part_failed(failure: PartFailure) -> Failed:
    causes = [failure.part]
    error = failure.__cause__
    while isinstance(error, PartFailure):
        causes.append(error.part)
        failure, error = error, error.__cause__
    assert error is not None
    why = str(error)[:REASON_CHARS] if failure.kind == "invalid" else reason(error)
    return Failed(failure.kind, f"part {'/'.join(causes)!r}: {why}", detail(error))


def _refusal(error: BaseException) -> Refused:
    users_fault = isinstance(error, UserError)
    return Refused(str(error) if users_fault else reason(error), users_fault)
