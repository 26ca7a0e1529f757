"""The subset of JSON Schema that the `format` reward supports. Unsupported keywords are refused, not ignored."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from roll.config.suggest import did_you_mean

_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: _is_whole(value),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}

_RULES: dict[str, Callable[[Any, Any], bool]] = {
    "type": lambda value, types: any(_TYPES[kind](value) for kind in ([types] if isinstance(types, str) else types)),
    "enum": lambda value, options: any(_same(value, option) for option in options),
    "const": lambda value, constant: _same(value, constant),
    "required": lambda value, names: not isinstance(value, dict) or all(name in value for name in names),
    "properties": lambda value, shapes: (
        not isinstance(value, dict) or all(fits(value[name], shape) for name, shape in shapes.items() if name in value)
    ),
    "items": lambda value, shape: not isinstance(value, list) or all(fits(item, shape) for item in value),
    "minItems": lambda value, least: not isinstance(value, list) or len(value) >= least,
    "maxItems": lambda value, most: not isinstance(value, list) or len(value) <= most,
    "minLength": lambda value, least: not isinstance(value, str) or len(value) >= least,
    "maxLength": lambda value, most: not isinstance(value, str) or len(value) <= most,
    "pattern": lambda value, pattern: not isinstance(value, str) or re.search(pattern, value) is not None,
    "minimum": lambda value, least: not _TYPES["number"](value) or value >= least,
    "maximum": lambda value, most: not _TYPES["number"](value) or value <= most,
}

_NUMBERS = {"minItems", "maxItems", "minLength", "maxLength", "minimum", "maximum"}
_WORDS = {*_RULES, "additionalProperties", "title", "description"}


def fits(value: Any, shape: Mapping[str, Any]) -> bool:
    """Whether a JSON value satisfies the schema."""
    if not all(_RULES[word](value, rule) for word, rule in shape.items() if word in _RULES):
        return False
    others = shape.get("additionalProperties", True)
    if others is True or not isinstance(value, dict):
        return True
    rest = [item for name, item in value.items() if name not in shape.get("properties", {})]
    return not rest if others is False else all(fits(item, others) for item in rest)


def check_shape(shape: Any, path: str = "schema") -> None:
    """Raises a `ValueError` that names the unsupported part of a schema."""
    if not isinstance(shape, Mapping):
        raise ValueError(f"{path} is {shape!r}, but takes a mapping such as {{type: object}}")
    for word, rule in shape.items():
        if word not in _WORDS:
            raise ValueError(f"{path}.{word} is not known here{did_you_mean(str(word), _WORDS)}")
        if word == "type":
            for kind in [rule] if isinstance(rule, str) else rule:
                if kind not in _TYPES:
                    raise ValueError(f"{path}.type {kind!r} is not a type of JSON{did_you_mean(str(kind), _TYPES)}")
        elif word in _NUMBERS and not _TYPES["number"](rule):
            raise ValueError(f"{path}.{word} is {rule!r}, but takes a number")
        elif word in ("enum", "required") and not isinstance(rule, list):
            raise ValueError(f"{path}.{word} is {rule!r}, but takes a list")
        elif word == "pattern":
            _check_pattern(rule, path)
        elif word == "properties":
            for name, inner in rule.items():
                check_shape(inner, f"{path}.properties.{name}")
        elif word == "items" or (word == "additionalProperties" and not isinstance(rule, bool)):
            check_shape(rule, f"{path}.{word}")


def _check_pattern(pattern: str, path: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{path}.pattern {pattern!r} is not a regular expression: {error}") from error


def _is_whole(value: Any) -> bool:
    return _TYPES["number"](value) and value == value // 1


def _same(a: Any, b: Any) -> bool:
    """Equality of JSON values, where true is not 1, at any depth."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)
