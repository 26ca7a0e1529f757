"""Plain values as JSON and back, between a program and who judges it: what arrives is of Python's own types and nothing
else, so that no method of the program's, such as an `__eq__` that always agrees, comes along with it.

Of a subclass the value remains (a `Counter` arrives as a `dict`). What is not plain stays where it is, and a number
stands for it.
"""

from __future__ import annotations

import json
from collections import deque

TYPE_CHECKING = False  # without importing typing, which takes a while
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_SMALL = 1 << 63
_DEEPEST = 200
"""How far values may nest: deeper ones are not plain."""
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_TYPES = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, object)
_NUMBERS = ("Decimal", "Fraction")


def dump(value: Any, keep: Callable[[Any], int]) -> bytes:
    """A value as one line. `keep` is given what is not plain, and returns a number for it."""
    return json.dumps(_encoded(value, keep, 0)).encode() + b"\n"


def load(line: bytes, kept: Callable[[int], Any]) -> Any:
    """The value of a line. `kept` makes what stands for one that stayed where it is. `ValueError` if there is none."""
    try:
        return _decoded(json.loads(line), kept)
    except (TypeError, KeyError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"not a value: {error}") from None


def _encoded(value: Any, keep: Callable[[Any], int], depth: int) -> Any:
    if depth > _DEEPEST:
        return _tagged("kept", keep(value))
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        number = int(value)
        return number if -_SMALL < number < _SMALL else _tagged("int", hex(number))
    if isinstance(value, float):
        return float(value) if value - value == 0 else _tagged("float", repr(float(value)))
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (bytes, bytearray)):
        return _tagged("bytes", bytes(value).hex())
    if isinstance(value, complex):
        return _tagged("complex", repr(complex(value)))
    if isinstance(value, list):
        return [_encoded(item, keep, depth + 1) for item in value]
    if isinstance(value, dict):
        pairs = [[_encoded(key, keep, depth + 1), _encoded(item, keep, depth + 1)] for key, item in value.items()]
        return _tagged("dict", pairs)
    if isinstance(value, type) and value in _TYPES:
        return _tagged("type", value.__name__)
    if isinstance(value, range):
        return _tagged("range", [value.start, value.stop, value.step])
    if type(value).__name__ in _NUMBERS and type(value).__module__ in ("decimal", "fractions"):
        return _tagged(type(value).__name__, str(value))
    for name, sequence in _SEQUENCES.items():
        if isinstance(value, sequence):
            return _tagged(name, [_encoded(item, keep, depth + 1) for item in value])
    return _tagged("kept", keep(value))


def _decoded(data: Any, kept: Callable[[int], Any]) -> Any:
    if isinstance(data, list):
        return [_decoded(item, kept) for item in data]
    if not isinstance(data, dict):
        return data
    ((name, inner),) = data.items()
    if name == "dict":
        return {_decoded(key, kept): _decoded(item, kept) for key, item in inner}
    if name in _SEQUENCES:
        return _SEQUENCES[name](_decoded(item, kept) for item in inner)
    if name in _NUMBERS:
        return _number(name, inner)
    if name == "int":
        return int(inner, 16)
    if name == "float":
        return float(inner)
    if name == "bytes":
        return bytes.fromhex(inner)
    if name == "complex":
        return complex(inner)
    if name == "range":
        return range(*inner)
    if name == "type":
        return {kind.__name__: kind for kind in _TYPES}[inner]
    if name == "kept":
        return kept(int(inner))
    raise ValueError(f"not a value: {name}")


def _number(name: str, text: str) -> Any:
    if name == "Decimal":
        from decimal import Decimal

        return Decimal(text)
    from fractions import Fraction

    over, _, under = text.partition("/")  # no exponents: "1e999999999" would be written out
    return Fraction(int(over), int(under or "1"))


def _tagged(name: str, value: Any) -> Any:
    return {name: value}
