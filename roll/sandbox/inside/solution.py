"""Serves calls of untrusted functions: reads requests from standard input and answers on standard output.

Requests, where `what` is an object that stayed in this process, and in `call` also a global name of the program:

    ["call", what, arguments, named arguments]
    ["change", what, arguments, named arguments]    the answer includes the arguments if the call changed them
    ["solve", name, arguments, named arguments]     calls a function, or else a method of the class `Solution`
    ["name", name]                                  a global name of the program
    ["get", what, name], ["set", what, name, value]
    ["do", name, arguments]                         calls an operator or a builtin
    ["raised"]                                      the last error: its class, arguments and attributes

An answer is `["value", value]` or `["error", its type, its text]`. The program's output goes to standard error. The
program may write answers of its own: knowing the question does not tell it the right answer.
"""

from __future__ import annotations

import _operator as operators
import builtins
import os
import sys

from roll.sandbox.inside import codec

TYPE_CHECKING = False  # without importing typing, which is slow
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def serve(source: str) -> None:
    """Runs the program, then answers requests until there are no more."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    module = type(sys)("solution")
    sys.modules["solution"] = module  # where dataclasses and pickle look for the program's classes
    serving = _Serving(module.__dict__)
    broken = serving.error_of(lambda: exec(compile(source, "solution.py", "exec"), module.__dict__))
    for line in requests:
        answers.write(serving.line(broken or serving.answer(line)))
        answers.flush()


class _Serving:
    """The program, and all its objects that the other side has a reference to."""

    def __init__(self, program: dict[str, Any]) -> None:
        self._program = program
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._last_error: BaseException | None = None

    def answer(self, line: bytes) -> list[Any]:
        result: list[Any] = []
        return self.error_of(lambda: result.extend(self._act(line))) or ["value", *result]

    def line(self, answer: list[Any]) -> bytes:
        result: list[bytes] = []
        error = self.error_of(lambda: result.append(codec.dump(answer, self._keep)))
        return codec.dump(error, self._keep) if error else result[0]

    def error_of(self, act: Callable[[], None]) -> list[Any] | None:
        try:
            act()
        except SystemExit:
            raise
        except BaseException as error:
            self._last_error = error
            return ["error", type(error).__name__, _text(error)]
        finally:
            _flush()
        return None

    def _act(self, line: bytes) -> list[Any]:
        kind, *rest = codec.load_trusted(line, lambda number, *_: self._objects[number])
        if kind == "call":
            what, arguments, named = rest
            return [(self._named(what) if isinstance(what, str) else what)(*arguments, **named)]
        if kind == "change":
            what, arguments, named = rest
            before = codec.dump([arguments, named], id)
            result = what(*arguments, **named)
            return [result, [arguments, named] if codec.dump([arguments, named], id) != before else None]
        if kind == "solve":
            name, arguments, named = rest
            found = name not in self._program and getattr(self._program.get("Solution"), name, None)
            return [(getattr(self._program["Solution"](), name) if found else self._named(name))(*arguments, **named)]
        if kind == "name":
            return [self._named(rest[0])]
        if kind == "get":
            return [getattr(*rest)]
        if kind == "set":
            setattr(*rest)
            return [None]
        if kind == "do":
            name, arguments = rest
            return [getattr(operators if hasattr(operators, name) else builtins, name)(*arguments)]
        error = self._last_error
        return [[type(error), list(error.args), dict(vars(error))] if error is not None else None]

    def _named(self, name: str) -> Any:
        if name not in self._program:
            raise NameError(f"name {name!r} is not defined")
        return self._program[name]

    def _keep(self, value: Any) -> int:
        if id(value) not in self._numbers:  # a kept object stays alive, so that its id stays unique
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return self._numbers[id(value)]


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
