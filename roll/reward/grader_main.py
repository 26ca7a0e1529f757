"""Main module of a grader process: loads the reward function, then judges one attempt at a time until the pool closes its
connection.

The function runs in the main thread, where timeouts by signal work. This module imports little, because every replacement
of a killed process pays for the imports.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
import traceback
from dataclasses import replace
from typing import BinaryIO, cast

from roll.config.errors import UserError
from roll.data.task import Response, Task
from roll.process.child_main import REASON_CHARS, command, connect, detail, log_failure, reason
from roll.process.framing import read_payload
from roll.process.memory_limit import MemoryLimit
from roll.reward.base import (
    FailureKind,
    PartFailure,
    Result,
    RewardFn,
    answer_of,
    is_deterministic,
    name_of,
    normalise,
    on_part_start,
)
from roll.reward.domains import ByDomain
from roll.reward.ipc import (
    Answer,
    GraderEntered,
    GraderFailed,
    GraderReady,
    GraderRefused,
    GraderScored,
    GraderSetUp,
    write_answer,
)
from roll.reward.model_reward import RoleScores, role_scores

COMMAND = command("roll.reward.grader_main")


def main() -> None:
    """Serves the pool that started this process."""
    with contextlib.suppress(ConnectionError):
        serve(cast(BinaryIO, connect().makefile("rwb")))
    os._exit(0)  # without waiting for threads or exit handlers of the function


def serve(stream: BinaryIO) -> None:
    """Loads the reward that the first frame names, then answers jobs until the connection ends."""
    payload = read_payload(stream)
    if payload is None:
        return
    try:
        setup: GraderSetUp = pickle.loads(payload)
        function = setup.source.load()
        memory = MemoryLimit(setup.memory_mb)
    except BaseException as error:
        write_answer(stream, _refusal(error))
        return
    write_answer(stream, GraderReady())
    on_part_start.set(lambda part: write_answer(stream, GraderEntered(part)))
    pid = os.getpid()
    while (job := read_payload(stream)) is not None:
        answer, out_of_memory = judge_job(function, job)
        if os.getpid() != pid:  # the function forked, and the copy of this process reached this code
            return
        if out_of_memory and isinstance(answer, GraderFailed):
            memory_reason = f"it took more memory than reward.memory_mb={setup.memory_mb} allows: {answer.reason}"
            answer = replace(
                answer, reason=memory_reason if setup.memory_mb else answer.reason, is_last=memory.is_short()
            )
        write_answer(stream, answer)
        if isinstance(answer, GraderFailed):
            log_failure(answer.detail)


def judge_job(function: RewardFn, job: bytes) -> tuple[Answer, bool]:
    """The answer to a pickled job, whatever the function raises or returns, and whether it ran out of memory."""
    try:
        task, response, known_scores, votes = pickle.loads(job)
    except BaseException as error:
        return GraderFailed(
            "raised", f"the task cannot be read in the grader process: {reason(error)}", detail(error)
        ), False
    return judge_attempt(function, task, response, known_scores, votes)


def judge_attempt(
    function: RewardFn, task: Task, response: Response, known_scores: RoleScores | None = None, votes: bool = False
) -> tuple[GraderScored | GraderFailed, bool]:
    """The answer to an unpickled job, and whether it ran out of memory; `known_scores` has the scores of model roles;
    with `votes` it includes the extracted answer."""
    started = time.perf_counter()
    role_scores.set(known_scores or {})
    try:
        result = function(task, response)
        seconds = time.perf_counter() - started
        parts_s = dict(result.seconds) if isinstance(result, Result) else {}
        deterministic = is_deterministic(function, task)
        answer = answer_of(function, task, response) if votes else None
    except BaseException as error:  # SystemExit too: sys.exit() in a reward counts as raised
        return _failure_of(error)
    try:
        verdict = normalise(result, lambda: _who(function, task))
        if answer is not None:
            verdict = replace(verdict, answer=answer)
        return GraderScored(verdict, seconds, parts_s, deterministic), False
    except ValueError as error:
        return GraderFailed("invalid", str(error)[:REASON_CHARS]), False
    except BaseException as error:
        what = f"the reward function returned what cannot be read: {reason(error)}"
        return GraderFailed("invalid", what, detail(error)), False


def _who(function: RewardFn, task: Task) -> str:
    """The name of the function in a message; for rewards of several domains, that of the task's domain."""
    domain_reward = function.of(task.domain) if isinstance(function, ByDomain) else function
    return f"the reward function {name_of(domain_reward or function)!r}"


def _failure_of(error: BaseException) -> tuple[GraderFailed, bool]:
    """The failure for an exception, naming the part that raised it, and whether it ran out of memory."""
    kind: FailureKind = "raised"
    part = ""
    if isinstance(error, PartFailure):
        kind, part = error.kind, f"part {error.part!r}: "
        assert error.__cause__ is not None
        error = error.__cause__
    if isinstance(error, MemoryError):
        traceback.clear_frames(error.__traceback__)  # frees the memory that the call's frames hold
    why = str(error)[:REASON_CHARS] if kind == "invalid" else reason(error)
    return GraderFailed(kind, f"{part}{why}", detail(error)), isinstance(error, MemoryError)


def _refusal(error: BaseException) -> GraderRefused:
    users_fault = isinstance(error, UserError)
    return GraderRefused(str(error) if users_fault else reason(error), users_fault)
