"""Runs tests against functions that live in another process: neither sees the other's memory.

Tests are texts with `assert` in them, given with the names that they use and do not define. Such a name stands for what
the program in the other process has under it. Calls go out on the standard output, answers come in on the standard input,
and verdicts, one line a test, leave by the standard error.
"""

from __future__ import annotations

import builtins
import os

from roll.sandbox.inside import values

TYPE_CHECKING = False  # without importing typing, which takes a while
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_LONGEST = 4 << 20
"""Bytes of an answer."""


class Gone(BaseException):
    """The other process does not answer any more. No `except Exception` of a test's takes it for the test's own."""


class Line:
    """The connection to the other process."""

    def __init__(self) -> None:
        self._answers, self._requests = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")

    def ask(self, *request: Any) -> Any:
        """What the other process answers, or the error that it met."""
        try:
            self._requests.write(values.dump(list(request), _number_of))
            self._requests.flush()
            line = self._answers.readline(_LONGEST)
        except OSError:
            raise Gone from None
        if not line.endswith(b"\n"):
            raise Gone
        answer = values.load(line, lambda number: Remote(self, number))
        if not isinstance(answer, list) or len(answer) < 2:
            raise ValueError("not an answer")
        if answer[0] == "value":
            return answer[1]
        kind = getattr(builtins, str(answer[1]), RuntimeError)
        is_error = isinstance(kind, type) and issubclass(kind, Exception)
        raise (kind if is_error else RuntimeError)(str(answer[-1]))


class Remote:
    """Stands for something in the other process: it can be called, and has its attributes."""

    def __init__(self, line: Line, what: Any) -> None:
        self.__dict__.update(_line=line, _what=what)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._line.ask("call", self._reference(), list(arguments), named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._line.ask("get", self._reference(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._line.ask("set", self._reference(), name, value)

    def _reference(self) -> Any:
        return self._what if isinstance(self._what, str) else self


def check(setup: str, tests: Sequence[str], names: Sequence[str]) -> None:
    """Runs every test; each begins where the setup ended."""
    line, verdicts = Line(), os.dup(2)
    for fd in (0, 1, 2):
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, fd)
        os.close(nothing)
    for test in tests:
        globals_: dict[str, Any] = {name: Remote(line, name) for name in names}
        globals_["__name__"] = "tests"
        os.write(verdicts, _verdict(setup + "\n" + test, globals_).encode("utf-8", "replace") + b"\n")


def _verdict(text: str, names: dict[str, Any]) -> str:
    try:
        exec(compile(text, "tests.py", "exec"), names)
    except Gone:
        return "gone"
    except BaseException as error:
        return "failed " + " ".join(f"{type(error).__name__}: {error}"[:500].split())
    return "passed"


def _number_of(value: Any) -> int:
    if isinstance(value, Remote) and isinstance(value._what, int):
        return value._what
    raise TypeError(f"{type(value).__name__} cannot be sent to the program")
