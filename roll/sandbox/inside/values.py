"""Plain values as JSON and back, between a program and who judges it: what arrives is of Python's own types and nothing
else, so that no method of the program's, such as an `__eq__` that always agrees, comes along with it.

Of a subclass the value remains; of a named tuple the names of its items too. An exception class of the program arrives as
an empty one of that name. What is not plain stays where it is, and a number stands for it.
"""

from __future__ import annotations

import builtins
from collections import Counter, OrderedDict, defaultdict, deque

try:
    from _json import encode_basestring_ascii as _quoted  # json itself takes as long to import as half of Python's start
except ImportError:
    from json.encoder import encode_basestring_ascii as _quoted

TYPE_CHECKING = False  # without importing typing, which takes a while
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_SMALL = 1 << 63
_DEEPEST = 200
"""How far values may nest: deeper ones are not plain."""
_SHORT = 1 << 14
_DICTS: dict[str, Any] = {"Counter": Counter, "OrderedDict": OrderedDict, "dict": dict}
_VIEWS: dict[str, Any] = {"keys": type({}.keys()), "values": type({}.values()), "items": type({}.items())}
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_TYPES = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, object)
_FUNCTIONS: tuple[Any, ...] = (
    *(
        abs,
        all,
        any,
        ascii,
        bin,
        callable,
        chr,
        divmod,
        enumerate,
        filter,
        format,
        hash,
        hex,
        isinstance,
        issubclass,
        iter,
    ),
    *(len, map, max, min, next, oct, ord, pow, repr, reversed, round, slice, sorted, sum, type, zip),
)
"""What of Python's own may cross over by name: nothing that runs a text or opens a file."""
_NUMBERS = ("Decimal", "Fraction")
_TIMES = ("date", "time", "datetime", "timedelta")
_WORDS: dict[str, Any] = {"__builtins__": {}, "null": None, "true": True, "false": False}


class Named(tuple):  # type: ignore[type-arg]
    """A tuple whose items have names too, as those of a named tuple."""

    _fields: list[str]

    @classmethod
    def of(cls, names: list[str], items: list[Any]) -> Named:
        made = cls(items)
        made.__dict__.update({name: items[number] for number, name in enumerate(names)}, _fields=names)
        return made


def dump(value: Any, keep: Callable[[Any], int | list[Any]]) -> bytes:
    """A value as one line. `keep` is given what is not plain, and returns a number for it, or, of an iterator that is not
    to stay, what it gives."""
    return _written(value, keep, 0).encode() + b"\n"


def load(line: bytes, kept: Callable[..., Any]) -> Any:
    """The value of a line. `kept` makes what stands for one that stayed where it is, from its number, and
    of an exception class from its name and bases too. `ValueError` if there is none."""
    import json

    try:
        return _decoded(json.loads(line), kept)
    except (TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"not a value: {error}") from None


def load_trusted(line: bytes, kept: Callable[..., Any]) -> Any:
    """The same of a line that `dump` is known to have made: sooner, if it is short, because it needs no json."""
    if len(line) > _SHORT or b"\\ud" in line:  # of which Python makes half characters, where JSON means a whole one
        return load(line, kept)
    return _decoded(eval(line, dict(_WORDS)), kept)


def _written(value: Any, keep: Callable[[Any], int | list[Any]], depth: int) -> str:
    if depth > _DEEPEST:
        return _kept(value, keep, depth)
    if value is None or value is True or value is False:
        return "null" if value is None else "true" if value else "false"
    if isinstance(value, int):
        number = int(value)
        return repr(number) if -_SMALL < number < _SMALL else _tagged("int", _quoted(hex(number)))
    if isinstance(value, float):
        return repr(float(value)) if value - value == 0 else _tagged("float", _quoted(repr(float(value))))
    if isinstance(value, str):
        return str(_quoted(str.__str__(value)))
    if isinstance(value, (bytes, bytearray)):
        return _tagged("bytes" if isinstance(value, bytes) else "bytearray", _quoted(bytes(value).hex()))
    if isinstance(value, complex):
        return _tagged("complex", _quoted(repr(complex(value))))
    if isinstance(value, list):
        return _listed(value, keep, depth)
    if isinstance(value, dict):
        return _mapping(value, keep, depth)
    for name, sequence in _SEQUENCES.items():
        if isinstance(value, sequence):
            names = getattr(value, "_fields", None)
            if name == "tuple" and isinstance(names, (list, tuple)) and len(names) == len(value):
                return _tagged("named", _listed([list(names), list(value)], keep, depth))
            return _tagged(name, _listed(value, keep, depth))
    for name, view in _VIEWS.items():
        if isinstance(value, view):
            return _tagged(name, _listed(map(list, value) if name == "items" else value, keep, depth))
    if isinstance(value, (range, slice)):
        name = "range" if isinstance(value, range) else "slice"
        return _tagged(name, _listed([value.start, value.stop, value.step], keep, depth))
    return _of_a_module(value, keep, depth)


def _mapping(value: Any, keep: Callable[[Any], int | list[Any]], depth: int) -> str:
    pairs = [list(pair) for pair in value.items()]
    if isinstance(value, defaultdict):
        factory = value.default_factory if value.default_factory in _TYPES else None
        return _tagged("defaultdict", _listed([factory, pairs], keep, depth))
    name = next(name for name, kind in _DICTS.items() if isinstance(value, kind))
    return _tagged(name, _listed(pairs, keep, depth))


def _of_a_module(value: Any, keep: Callable[[Any], int | list[Any]], depth: int) -> str:
    """What is plain for where it comes from: Python's own types, functions and exceptions, exact numbers and times."""
    kind, module = type(value).__name__, type(value).__module__
    if module in ("decimal", "fractions") and kind in _NUMBERS:
        return _tagged(kind, _quoted(str(value)))
    if module == "datetime" and kind in _TIMES:
        parts = kind == "timedelta" and repr([value.days, value.seconds, value.microseconds])
        return _tagged(kind, parts or _quoted(value.isoformat()))
    if isinstance(value, (type, type(len))) and _builtin(value.__name__) is value:
        return _tagged("builtin", _quoted(value.__name__))
    if isinstance(value, type) and issubclass(value, BaseException):
        number = keep(value)
        bases = [base for base in value.__bases__ if issubclass(base, BaseException)]
        return _tagged("exception", _listed([number, value.__name__, bases], keep, depth))
    return _kept(value, keep, depth)


def _kept(value: Any, keep: Callable[[Any], int | list[Any]], depth: int) -> str:
    stands = keep(value)
    return _tagged("kept", repr(stands)) if isinstance(stands, int) else _tagged("iterator", _listed(stands, keep, depth))


def _builtin(name: str) -> Any:
    """A function, type or exception of Python's own that may cross over; None if there is no such."""
    found = getattr(builtins, name, None)
    is_error = isinstance(found, type) and issubclass(found, BaseException)
    return found if is_error or any(found is known for known in (*_FUNCTIONS, *_TYPES)) else None


def _listed(values: Any, keep: Callable[[Any], int | list[Any]], depth: int) -> str:
    return "[" + ",".join([_written(item, keep, depth + 1) for item in values]) + "]"


def _tagged(name: str, text: str) -> str:
    return '{"' + name + '":' + text + "}"


def _decoded(data: Any, kept: Callable[..., Any]) -> Any:
    if isinstance(data, list):
        return [_decoded(item, kept) for item in data]
    if not isinstance(data, dict):
        return data
    ((name, inner),) = data.items()
    if name in _DICTS:
        return _DICTS[name](_pairs(inner, kept))
    if name in _SEQUENCES:
        return _SEQUENCES[name](_decoded(item, kept) for item in inner)
    if name in _VIEWS:
        items = _decoded(inner, kept)
        pairs = dict(items) if name == "items" else dict.fromkeys(items) if name == "keys" else dict(enumerate(items))
        return getattr(pairs, name)()
    if name in _NUMBERS:
        return _number(name, inner)
    if name in _TIMES:
        return _time(name, inner)
    if name in _SIMPLE:
        return _SIMPLE[name](inner)
    if name == "named":
        return Named.of(*_decoded(inner, kept))
    if name == "defaultdict":
        return defaultdict(_decoded(inner[0], kept), _pairs(inner[1], kept))
    if name == "iterator":
        return iter(_decoded(inner, kept))
    if name == "kept":
        return kept(int(inner))
    if name == "exception":
        return kept(int(inner[0]), str(inner[1]), _decoded(inner[2], kept))
    raise ValueError(f"not a value: {name}")


def _pairs(data: Any, kept: Callable[..., Any]) -> dict[Any, Any]:
    return {_decoded(key, kept): _decoded(item, kept) for key, item in data}


def _own(name: str) -> Any:
    found = _builtin(name)
    if found is None:
        raise ValueError(f"not a value: {name}")
    return found


def _time(name: str, data: Any) -> Any:
    import datetime

    kind = getattr(datetime, name)
    return kind(*data) if name == "timedelta" else kind.fromisoformat(data)


def _number(name: str, text: str) -> Any:
    if name == "Decimal":
        from decimal import Decimal

        return Decimal(text)
    from fractions import Fraction

    over, _, under = text.partition("/")  # no exponents: "1e999999999" would be written out
    return Fraction(int(over), int(under or "1"))


_SIMPLE: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": complex,
    "range": lambda ends: range(*ends),
    "slice": lambda ends: slice(*ends),
    "builtin": _own,
}
