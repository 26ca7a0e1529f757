"""Serves calls of untrusted functions: it reads requests from the standard input and answers on the standard output.

A request is `["call", what, arguments, named arguments]`, `["get", what, name]` or `["set", what, name, value]`, where
`what` is a global name of the program or something that stayed here. An answer is `["value", value]` or `["error", its
type, its text]`. What the program prints goes to the standard error. It may write answers of its own: to know what is
asked is not to know what is right.
"""

from __future__ import annotations

import os
import sys

from roll.sandbox.inside import values

TYPE_CHECKING = False  # without importing typing, which takes a while
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def serve(source: str) -> None:
    """Runs the program's text, then answers requests until there are no more."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    program: dict[str, Any] = {"__name__": "solution"}
    kept: list[Any] = []
    broken = _error_of(lambda: exec(compile(source, "solution.py", "exec"), program))
    for line in requests:
        answer = broken or _answer(line, program, kept)
        answers.write(_line(answer, kept))
        answers.flush()


def _answer(line: bytes, program: dict[str, Any], kept: list[Any]) -> list[Any]:
    made: list[Any] = []

    def act() -> None:
        kind, what, *rest = values.load(line, kept.__getitem__)
        if isinstance(what, str):
            if what not in program:
                raise NameError(f"name {what!r} is not defined")
            what = program[what]
        if kind == "call":
            made.append(what(*rest[0], **rest[1]))
        elif kind == "get":
            made.append(getattr(what, *rest))
        else:
            setattr(what, *rest)
            made.append(None)

    return _error_of(act) or ["value", made[0]]


def _line(answer: list[Any], kept: list[Any]) -> bytes:
    def keep(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    made: list[bytes] = []
    error = _error_of(lambda: made.append(values.dump(answer, keep)))
    return values.dump(error, keep) if error else made[0]


def _error_of(act: Callable[[], None]) -> list[Any] | None:
    try:
        act()
    except SystemExit:
        raise
    except BaseException as error:
        return ["error", type(error).__name__, _text(error)]
    finally:
        _flush()
    return None


def _text(error: BaseException) -> str:
    try:
        return str(error)[:500]
    except BaseException:
        return ""


def _flush() -> None:
    try:
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError):
        pass
