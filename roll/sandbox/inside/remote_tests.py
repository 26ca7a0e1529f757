"""Runs tests against functions in another process: neither process sees the other's memory.

Tests are texts with `assert`, given with the names that they use but do not define. Such a name refers to the program's
object of that name in the other process. Calls are sent on standard output, answers arrive on standard input, and
verdicts, one line per test, go to standard error.

The program never sees what a test expects: whether something of the program's is equal to a plain value, less than it, or
contains it, is decided here. Only comparisons of two objects of the program are sent to the program.
"""

from __future__ import annotations

import builtins
import itertools
import os
import sys
from collections import deque

from roll.sandbox.inside import codec

TYPE_CHECKING = False  # without importing typing, which is slow
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

_MAX_ANSWER_BYTES = 4 << 20
"""Maximum bytes of an answer."""
_MAX_ITEMS = 100_000
"""Maximum items of an iterator that is passed as an argument."""
_MUTABLE = (list, dict, set, deque, bytearray)


class ProgramGone(BaseException):
    """The other process no longer answers. A BaseException, so that a test's `except Exception` does not catch it."""


class NotSendable(BaseException):
    """An argument that cannot be sent to the program. It is not the program's error, so a test cannot expect it."""


class ProgramPipe:
    """The connection to the other process."""

    def __init__(self) -> None:
        self._answers, self._requests = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        self._stand_ins: dict[int, Any] = {}
        self.may_stop = False
        """Whether the test is about the end of an iteration. Otherwise a call that raises StopIteration is an error:
        `all(map(…))` would take it for the end of the tests."""

    def ask(self, *request: Any) -> Any:
        """The other process's answer; raises the error that it reports."""
        return self._ask(*request)[1]

    def call(self, what: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The result of a call. Arguments that the call changed are changed here too."""
        if not any(isinstance(argument, (*_MUTABLE, tuple)) for argument in (*arguments, *named.values())):
            return self.ask("call", what, list(arguments), named)
        answer = self._ask("change", what, list(arguments), named)
        if len(answer) == 3 and isinstance(answer[2], list):
            _apply_changes([list(arguments), named], answer[2])
        return answer[1]

    def _ask(self, *request: Any) -> list[Any]:
        answer = self._exchange(*request)
        if answer[0] == "value":
            return answer
        error = self._error(str(answer[1]), str(answer[-1]))
        if isinstance(error, (StopIteration, StopAsyncIteration)) and request[:2] != ("do", "next") and not self.may_stop:
            error = RuntimeError(f"a call raised {type(error).__name__}")
        raise error

    def _exchange(self, *request: Any) -> list[Any]:
        try:
            self._requests.write(codec.dump(list(request), _number_of))
            self._requests.flush()
            line = self._answers.readline(_MAX_ANSWER_BYTES)
        except OSError:
            raise ProgramGone from None
        if not line.endswith(b"\n"):
            raise ProgramGone
        answer = codec.load(line, self._stand_in)
        if not isinstance(answer, list) or len(answer) < 2:
            raise ValueError("not an answer")
        return answer

    def _error(self, name: str, text: str) -> Exception:
        """The program's error, with its class, arguments and attributes if they are available."""
        try:
            kind, arguments, attributes = self._exchange("raised")[1]
            if not issubclass(kind, Exception):
                return RuntimeError(f"{name}: {text}")
            error: Exception = kind(*arguments)
            error.__dict__.update(attributes)
        except Exception:
            return _named_error(name, text)
        if "_number" in vars(kind):
            error.__dict__["_text"] = text
        return error

    def _stand_in(self, number: int, name: str = "", bases: Sequence[type] = ()) -> Any:
        if number not in self._stand_ins:
            self._stand_ins[number] = _exception(number, name, bases) if name else RemoteFunction(self, number)
        return self._stand_ins[number]


class RemoteFunction:
    """A proxy of an object in the other process: it can be called, and has its attributes, items and operators."""

    def __init__(self, line: ProgramPipe, number: int) -> None:
        self.__dict__.update(__line=line, __number=number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.__dict__["__line"].call(self, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__name__":
            raise AttributeError(name)
        return self.__dict__["__line"].ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["__line"].ask("set", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._do("getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._do("setitem", key, value)

    def __delitem__(self, key: Any) -> None:
        self._do("delitem", key)

    def __instancecheck__(self, thing: Any) -> bool:
        return isinstance(thing, RemoteFunction) and thing._do("isinstance", self) is True

    def __eq__(self, other: object) -> bool:
        """A plain value is never equal: the program would see what is expected, and could agree."""
        return isinstance(other, RemoteFunction) and self._do("eq", other) is True

    def __hash__(self) -> int:
        return int(self._do("hash"))

    def _do(self, name: str, *others: Any) -> Any:
        return self.__dict__["__line"].ask("do", name, [self, *others])


def _unary(name: str) -> Callable[[RemoteFunction], Any]:
    return lambda self: self._do(name)


def _binary(name: str) -> Callable[[RemoteFunction, Any], Any]:
    return lambda self, other: self._do(name, other) if isinstance(other, RemoteFunction) else NotImplemented


for _name in ("len", "iter", "next", "bool", "str", "repr", "int", "float", "abs", "neg", "reversed"):
    setattr(RemoteFunction, f"__{_name}__", _unary(_name))
for _name in ("lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_"):
    setattr(RemoteFunction, f"__{_name.rstrip('_')}__", _binary(_name))


class _Names(dict):  # type: ignore[type-arg]
    """The names of a test. Functions and classes of the program that the test uses are here from the start, also for
    class bodies, where Python does not call `__missing__`; variables are looked up when they are used."""

    def __init__(self, pipe: ProgramPipe, names: Iterable[str]) -> None:
        super().__init__(__name__="tests")
        self._line, self._names = pipe, frozenset(names)
        for name in self._names:
            try:
                self.__missing__(name)
            except (Exception, ProgramGone):  # the test gets the error where it uses the name
                continue

    def __missing__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        found = self._line.ask("name", name)
        if isinstance(found, (RemoteFunction, type)):
            self[name] = found  # not cached otherwise: a variable may have changed next time
        return found


def check(setup: str, tests: Sequence[str], names: Sequence[str]) -> None:
    """Runs every test; each starts with a fresh setup."""
    pipe, verdicts = ProgramPipe(), os.dup(2)
    for fd in (0, 1, 2):
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, fd)
        os.close(nothing)
    sys.modules["tests"] = type(sys)("tests")  # where dataclasses look for the module of a class
    for test in tests:
        pipe.may_stop = "StopIteration" in test or "StopAsyncIteration" in test
        os.write(verdicts, _verdict(setup + "\n" + test, _Names(pipe, names)).encode("utf-8", "replace") + b"\n")


def _verdict(text: str, names: dict[str, Any]) -> str:
    try:
        exec(compile(text, "tests.py", "exec"), names)
    except ProgramGone:
        return "gone"
    except BaseException as error:
        return "failed " + " ".join(f"{type(error).__name__}: {error}"[:500].split())
    return "passed"


def _number_of(value: Any) -> int | list[Any]:
    if isinstance(value, RemoteFunction):
        return int(value.__dict__["__number"])
    if isinstance(value, type) and "_number" in vars(value):
        return int(vars(value)["_number"])
    if hasattr(value, "__next__"):
        items = list(itertools.islice(value, _MAX_ITEMS))
        if len(items) < _MAX_ITEMS:
            return items
        raise NotSendable(f"an iterator of {_MAX_ITEMS} items or more cannot be sent to the program")
    what = getattr(value, "__name__", type(value).__name__)
    raise NotSendable(f"{what} cannot be sent to the program: functions, classes and objects of the tests stay with them")


def _exception(number: int, name: str, bases: Sequence[type]) -> type:
    """A class that represents an exception class of the program: it can be raised and caught."""
    if not all(issubclass(base, Exception) for base in bases):
        bases = (Exception,)
    return type(name, tuple(bases), {"_number": number, "__str__": _text_of})


def _named_error(name: str, text: str) -> Exception:
    kind = getattr(builtins, name, None)
    try:
        return kind(text) if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError(f"{name}: {text}")
    except Exception:  # exceptions that need more than a text
        return RuntimeError(f"{name}: {text}")


def _text_of(error: BaseException) -> str:
    return str(vars(error).get("_text") or BaseException.__str__(error))


def _apply_changes(own: Any, changed: Any) -> Any:
    """Applies the program's changes of a value to the test's own object, so that other references see them."""
    if type(own) is not type(changed):
        return changed
    if isinstance(own, tuple):
        return tuple(map(_apply_changes, own, changed)) if len(own) == len(changed) else changed
    if not isinstance(own, _MUTABLE) or own == changed:
        return own if isinstance(own, _MUTABLE) else changed
    if isinstance(own, dict):
        items = {key: _apply_changes(own[key], item) if key in own else item for key, item in changed.items()}
        own.clear()
        for key, item in items.items():
            own[key] = item
    elif isinstance(own, set):
        own.clear()
        own.update(changed)
    else:
        changed_items = list(map(_apply_changes, own, changed)) + list(changed)[len(own) :]
        own.clear()
        own.extend(changed_items)
    return own
