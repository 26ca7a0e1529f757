"""Calls and tests untrusted functions from outside: the expected results are never in the process that runs them.

`call_all` is for calls whose results are compared here. `check_all` is for tests that are code themselves: they run in
one sandbox, the functions in another, connected by pipes.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from roll.sandbox.execution import execute
from roll.sandbox.inside import codec
from roll.sandbox.isolation import Sandbox
from roll.sandbox.launch import inside, source_of
from roll.sandbox.program import Limits, Program, ProgramResult, SandboxError

_END_S = 60.0
_REASON_CHARS = 500

_MODULES = {inside(name): source_of(name) for name in ("codec", "solution")}
_TEST_MODULES = {inside(name): source_of(name) for name in ("codec", "remote_tests")}


@dataclass(frozen=True)
class FunctionCall:
    """A call of a function that the program defines."""

    name: str
    arguments: Sequence[Any] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    or_method: bool = False
    """Whether a method of the program's class `Solution` is called if there is no such function."""


@dataclass(frozen=True)
class CallReturned:
    """The return value of a call: plain values only."""

    value: Any


@dataclass(frozen=True)
class CallFailed:
    """A call without a usable result, and why."""

    why: str


Result = CallReturned | CallFailed


def call_all(
    sandbox: Sandbox, source: str, calls: Sequence[FunctionCall], limits: Limits
) -> tuple[list[Result], ProgramResult]:
    """One result per call, in order, from one process. After a call that ends the process, the others fail."""
    requests = [
        ["solve" if call.or_method else "call", call.name, list(call.arguments), dict(call.keywords)] for call in calls
    ]
    stdin = b"".join(codec.dump(request, _reject_argument) for request in requests)
    outcome = execute(sandbox, _solution_program(source, stdin), limits)
    lines = outcome.stdout.encode().splitlines(keepends=True)
    results = [_result(line) for line in lines[: len(calls)]]
    too_early = f"the program ended before it answered ({outcome.kind})"
    return results + [CallFailed(too_early)] * (len(calls) - len(results)), outcome


def check_all(
    sandbox: Sandbox, source: str, setup: str, tests: Sequence[str], names: Sequence[str], limits: Limits
) -> tuple[list[str], ProgramResult]:
    """The failure of each test, empty if it passed; and the result of the program.

    `names` are those that the tests use but do not define.
    """
    judge = f"from {inside('remote_tests')} import check\ncheck({setup!r}, {list(tests)!r}, {list(names)!r})"
    with contextlib.ExitStack() as closing:
        requests_read, requests_write = os.pipe()
        answers_read, answers_write = os.pipe()
        closing.callback(os.close, requests_write)
        closing.callback(os.close, answers_read)
        program = _BackgroundProgram(sandbox, _solution_program(source), limits, requests_read, answers_write)
        closing.callback(program.end)
        tests_program = Program(judge, modules=_TEST_MODULES)
        tests_result = execute(sandbox, tests_program, limits, stdin=answers_read, stdout=requests_write)
        outcome = program.end()
    verdicts = tests_result.stderr.splitlines()[: len(tests)]
    reasons = ["" if verdict == "passed" else verdict for verdict in verdicts]
    too_early = f"the tests ended too early ({tests_result.kind})"
    return reasons + [too_early] * (len(tests) - len(reasons)), outcome


class _BackgroundProgram:
    """A program that runs in a background thread until it is ended. It owns its descriptors: they are closed when it
    ends, so that the other ends of the pipes notice."""

    def __init__(self, sandbox: Sandbox, program: Program, limits: Limits, stdin: int, stdout: int) -> None:
        self._stop = threading.Event()
        self._ended: ProgramResult | BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(sandbox, program, limits, stdin, stdout), daemon=True)
        self._thread.start()

    def end(self) -> ProgramResult:
        """Ends it and returns its result. May be called again."""
        self._stop.set()
        self._thread.join(timeout=_END_S)
        if isinstance(self._ended, BaseException):
            raise self._ended
        if self._ended is None:
            raise SandboxError(f"a program is still running {_END_S:g} s after it was killed")
        return self._ended

    def _run(self, sandbox: Sandbox, program: Program, limits: Limits, stdin: int, stdout: int) -> None:
        try:
            self._ended = execute(sandbox, program, limits, stdin=stdin, stdout=stdout, stopped=self._stop.is_set)
        except BaseException as error:
            self._ended = error
        finally:
            os.close(stdin)
            os.close(stdout)


def _solution_program(source: str, stdin: bytes = b"") -> Program:
    return Program(f"from {inside('solution')} import serve\nserve({source!r})", stdin, modules=_MODULES)


def _result(line: bytes) -> Result:
    """The result in a line, which the program may have written itself: never raises, and takes time linear in the
    line."""
    try:
        answer = codec.load(line, _reject_stand_in)
    except ValueError as error:
        return CallFailed(str(error)[:_REASON_CHARS])
    if isinstance(answer, list) and len(answer) == 2 and answer[0] == "value":
        return CallReturned(answer[1])
    details = answer[1:] if isinstance(answer, list) and answer[:1] == ["error"] else []
    why = ": ".join(part for part in details if isinstance(part, str))
    return CallFailed(why[:_REASON_CHARS] or "not an answer")


def _reject_argument(value: Any) -> NoReturn:
    raise ValueError(f"a call's arguments must be plain values, and {value!r} is none")


def _reject_stand_in(number: int, *what: Any) -> NoReturn:
    raise ValueError("what was returned is not a plain value")
