"""Encodes plain values as JSON lines and decodes them, between a program and its judge. Decoded values have only Python's
own types, so that no method of the program, such as an `__eq__` that always agrees, comes with them.

A subclass is reduced to its base value; a named tuple keeps the names of its items. An exception class of the program
arrives as an empty class of that name. Other values stay in their process and are represented by a number.

A program may write a line itself, so decoding computes nothing: a range stays a range, a container is built only from a
list in the line, and long integers are written in base 16. Time and memory are linear in the line's length: nesting is
limited, and so is the number of keys with the same hash, which a dictionary or set would have to compare with each other.
"""

from __future__ import annotations

import builtins
from collections import Counter, OrderedDict, defaultdict, deque

try:
    from _json import encode_basestring_ascii as _quoted  # json itself takes as long to import as half of Python's start
except ImportError:
    from json.encoder import encode_basestring_ascii as _quoted

TYPE_CHECKING = False  # without importing typing, which is slow
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_SMALL = 1 << 63
_MAX_DEPTH = 200
"""Maximum nesting: deeper values are not plain."""
_MAX_TRUSTED_BYTES = 1 << 14
_MAX_DIGITS = 4300
"""Maximum digits of an exact number in base 10, whose parsing takes quadratic time."""
_MAX_EQUAL_HASHES = 64
"""Maximum keys with the same hash in one dictionary or set: each is compared with all others. The hashes of -1 and -2 are
equal, and so are those of pairs and triples of them; no honest result has more than a few such."""
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
"""Builtins that may be sent by name: nothing that executes text or opens a file."""
_NUMBERS = ("Decimal", "Fraction")
_LEAVES = frozenset((int, float, str, bool, type(None)))
"""JSON types that are values as they are."""
_TIMES = ("date", "time", "datetime", "timedelta")
_WORDS: dict[str, Any] = {"__builtins__": {}, "null": None, "true": True, "false": False}


class NamedTupleValue(tuple):  # type: ignore[type-arg]
    """A tuple whose items have names, like a named tuple."""

    _fields: list[str]

    @classmethod
    def of(cls, names: list[str], items: list[Any]) -> NamedTupleValue:
        made = cls(items)
        made.__dict__.update({name: items[number] for number, name in enumerate(names)}, _fields=names)
        return made


def dump(value: Any, to_reference: Callable[[Any], int | list[Any]]) -> bytes:
    """A value as one line. `to_reference` gets a value that is not plain, and returns a number for it, or, for an
    iterator that is not to stay, its items."""
    return _encode(value, to_reference, 0).encode() + b"\n"


def load(line: bytes, make_stand_in: Callable[..., Any]) -> Any:
    """The value of a line. `make_stand_in` creates the stand-in for a value that stayed in its process, from its number,
    and for an exception class from its name and bases too. Raises `ValueError` for an invalid line."""
    import json

    try:
        return _decode(json.JSONDecoder(parse_int=_small).decode(line.decode()), make_stand_in)
    except (TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"not a value: {error}") from None


def load_trusted(line: bytes, make_stand_in: Callable[..., Any]) -> Any:
    """The same for a line that `dump` certainly wrote: faster if it is short, because it needs no json."""
    if (
        len(line) > _MAX_TRUSTED_BYTES or b"\\ud" in line
    ):  # a surrogate pair is one character in JSON, but two halves in Python
        return load(line, make_stand_in)
    return _decode(eval(line, dict(_WORDS)), make_stand_in)


def _encode(value: Any, to_reference: Callable[[Any], int | list[Any]], depth: int) -> str:
    if depth > _MAX_DEPTH:
        return _write_stand_in(value, to_reference, depth)
    if value is None or value is True or value is False:
        return "null" if value is None else "true" if value else "false"
    if isinstance(value, int):
        number = int(value)
        return repr(number) if -_SMALL < number < _SMALL else _tag("int", _quoted(hex(number)))
    if isinstance(value, float):
        return repr(float(value)) if value - value == 0 else _tag("float", _quoted(repr(float(value))))
    if isinstance(value, str):
        return str(_quoted(str.__str__(value)))
    if isinstance(value, (bytes, bytearray)):
        return _tag("bytes" if isinstance(value, bytes) else "bytearray", _quoted(bytes(value).hex()))
    if isinstance(value, complex):
        return _tag("complex", _quoted(repr(complex(value))))
    if isinstance(value, list):
        return _encode_list(value, to_reference, depth)
    if isinstance(value, dict):
        return _mapping(value, to_reference, depth)
    for name, sequence in _SEQUENCES.items():
        if isinstance(value, sequence):
            names = getattr(value, "_fields", None)
            if name == "tuple" and isinstance(names, (list, tuple)) and len(names) == len(value):
                return _tag("named", _encode_list([list(names), list(value)], to_reference, depth))
            return _tag(name, _encode_list(value, to_reference, depth))
    for name, view in _VIEWS.items():
        if isinstance(value, view):
            return _tag(name, _encode_list(map(list, value) if name == "items" else value, to_reference, depth))
    if isinstance(value, (range, slice)):
        name = "range" if isinstance(value, range) else "slice"
        return _tag(name, _encode_list([value.start, value.stop, value.step], to_reference, depth))
    return _of_a_module(value, to_reference, depth)


def _mapping(value: Any, to_reference: Callable[[Any], int | list[Any]], depth: int) -> str:
    pairs = [list(pair) for pair in value.items()]
    if isinstance(value, defaultdict):
        factory = value.default_factory if value.default_factory in _TYPES else None
        return _tag("defaultdict", _encode_list([factory, pairs], to_reference, depth))
    name = next(name for name, kind in _DICTS.items() if isinstance(value, kind))
    return _tag(name, _encode_list(pairs, to_reference, depth))


def _of_a_module(value: Any, to_reference: Callable[[Any], int | list[Any]], depth: int) -> str:
    """Values that are plain because of their origin: Python's own types, functions and exceptions, exact numbers and
    times."""
    kind, module = type(value).__name__, type(value).__module__
    if module in ("decimal", "fractions") and kind in _NUMBERS:
        return _tag(kind, _quoted(str(value)))
    if module == "datetime" and kind in _TIMES:
        parts = kind == "timedelta" and repr([value.days, value.seconds, value.microseconds])
        return _tag(kind, parts or _quoted(value.isoformat()))
    if isinstance(value, (type, type(len))) and _builtin(value.__name__) is value:
        return _tag("builtin", _quoted(value.__name__))
    if isinstance(value, type) and issubclass(value, BaseException):
        number = to_reference(value)
        bases = [base for base in value.__bases__ if issubclass(base, BaseException)]
        return _tag("exception", _encode_list([number, value.__name__, bases], to_reference, depth))
    return _write_stand_in(value, to_reference, depth)


def _write_stand_in(value: Any, to_reference: Callable[[Any], int | list[Any]], depth: int) -> str:
    number_or_items = to_reference(value)
    return (
        _tag("kept", repr(number_or_items))
        if isinstance(number_or_items, int)
        else _tag("iterator", _encode_list(number_or_items, to_reference, depth))
    )


def _builtin(name: str) -> Any:
    """A function, type or exception of Python's own that may be sent; None if there is none."""
    found = getattr(builtins, name, None)
    is_error = isinstance(found, type) and issubclass(found, BaseException)
    return found if is_error or any(found is known for known in (*_FUNCTIONS, *_TYPES)) else None


def _encode_list(values: Any, to_reference: Callable[[Any], int | list[Any]], depth: int) -> str:
    return "[" + ",".join([_encode(item, to_reference, depth + 1) for item in values]) + "]"


def _tag(name: str, text: str) -> str:
    return '{"' + name + '":' + text + "}"


def _decode(data: Any, make_stand_in: Callable[..., Any], depth: int = 0) -> Any:
    if isinstance(data, list):
        return _items(data, make_stand_in, depth)
    if not isinstance(data, dict):
        return data
    ((name, inner),) = data.items()
    if name in _DICTS:
        return _DICTS[name](_pairs(inner, make_stand_in, depth))
    if name in _SEQUENCES:
        items = _items(inner, make_stand_in, depth)
        return _SEQUENCES[name](_check_hashes(items) if name in ("set", "frozenset") else items)
    if name in _VIEWS:
        pairs = (
            _pairs(inner, make_stand_in, depth)
            if name == "items"
            else _dict_of_view(name, _items(inner, make_stand_in, depth))
        )
        return getattr(pairs, name)()
    if name in _NUMBERS:
        return _number(name, _text(inner, 2 * _MAX_DIGITS))
    if name in _TIMES:
        return _time(name, inner)
    if name in _SIMPLE:
        return _SIMPLE[name](_text(inner))
    if name == "range" or name == "slice":
        return (range if name == "range" else slice)(*_items(inner, make_stand_in, depth))
    if name == "named":
        names, items = _items(inner, make_stand_in, depth)
        return NamedTupleValue.of([_text(each) for each in _only(list, names)], _only(list, items))
    if name == "defaultdict":
        factory, made = inner
        return defaultdict(_decode(factory, make_stand_in, depth + 1), _pairs(made, make_stand_in, depth))
    if name == "iterator":
        return iter(_items(inner, make_stand_in, depth))
    if name == "kept":
        return make_stand_in(_only(int, inner))
    if name == "exception":
        number, title, bases = inner
        return make_stand_in(_only(int, number), _text(title), _items(bases, make_stand_in, depth))
    raise ValueError(f"not a value: {name[:80]}")


def _items(data: Any, make_stand_in: Callable[..., Any], depth: int) -> list[Any]:
    """The values of a list in the line: no other value is iterated over."""
    if depth > _MAX_DEPTH:
        raise ValueError("not a value: nested too deep")
    inner = depth + 1
    return [item if type(item) in _LEAVES else _decode(item, make_stand_in, inner) for item in _only(list, data)]


def _pairs(data: Any, make_stand_in: Callable[..., Any], depth: int) -> dict[Any, Any]:
    pairs = [_items(pair, make_stand_in, depth + 1) for pair in _only(list, data)]
    _check_hashes([key for key, _ in pairs])
    return dict(pairs)


def _dict_of_view(name: str, items: list[Any]) -> dict[Any, Any]:
    """A dictionary with these keys, or these values."""
    return dict.fromkeys(_check_hashes(items)) if name == "keys" else dict(enumerate(items))


def _check_hashes(keys: list[Any]) -> list[Any]:
    """The keys, if their hashes differ enough to build a dictionary or set in linear time."""
    if len(keys) > _MAX_EQUAL_HASHES:
        hashes = list(map(hash, keys))
        if len(set(hashes)) < len(hashes) and max(Counter(hashes).values()) > _MAX_EQUAL_HASHES:
            raise ValueError(f"not a value: more than {_MAX_EQUAL_HASHES} keys have the same hash")
    return keys


def _only(kind: Any, data: Any) -> Any:
    """The decoded data, if it is of that type."""
    if type(data) is not kind:
        raise ValueError(f"not a value: a {type(data).__name__} where a {kind.__name__} should be")
    return data


def _text(data: Any, longest: int | None = None) -> str:
    text: str = _only(str, data)
    if longest is not None and len(text) > longest:
        raise ValueError(f"not a value: a number of {len(text)} characters")
    return text


def _small(digits: str) -> int:
    """An integer in JSON. `dump` writes larger ones in base 16, which is parsed in linear time."""
    if len(digits) > 20:
        raise ValueError(f"not a value: a whole number of {len(digits)} digits")
    return int(digits)


def _builtin_of(name: str) -> Any:
    found = _builtin(name)
    if found is None:
        raise ValueError(f"not a value: {name[:80]}")
    return found


def _time(name: str, data: Any) -> Any:
    import datetime

    kind = getattr(datetime, name)
    return kind(*map(_whole, _only(list, data))) if name == "timedelta" else kind.fromisoformat(_text(data))


def _whole(data: Any) -> int:
    number: int = _only(int, data)
    return number


def _number(name: str, text: str) -> Any:
    if name == "Decimal":
        from decimal import Decimal

        made = Decimal(text)
        if made.is_snan():
            raise ValueError("not a value: comparing it raises an error")
        return made
    from fractions import Fraction

    over, _, under = text.partition("/")  # no exponents: "1e999999999" would be written out
    return Fraction(int(over), int(under or "1"))


_SIMPLE: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": complex,
    "builtin": _builtin_of,
}
