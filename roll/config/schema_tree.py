"""The schema as a tree of dotted keys: what stands where, what it takes in plain words, and which keys look alike."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from roll.config.schema import Config, Section
from roll.config.section import LARGEST, LARGEST_SEED, LONGEST_S
from roll.config.suggest import either, near, spelling
from roll.config.yaml_document import Path

UNKNOWN = object()
"""What `type_at` answers for a path that leads nowhere."""
ANY_NAME = "NAME"
"""Stands for the names a user chooses."""


def dotted(path: Path) -> str:
    """`("rollout", "stop", 0)` as `rollout.stop[0]`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def unwrapped(annotation: Any) -> Any:
    """The type without its constraints and without `| None`."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return unwrapped(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        others = [option for option in get_args(annotation) if option is not type(None)]
        return unwrapped(others[0]) if len(others) == 1 else annotation
    return annotation


def accepts_null(annotation: Any) -> bool:
    """Whether the type has a `| None`."""
    return get_origin(annotation) in (Union, types.UnionType) and type(None) in get_args(annotation)


def section_in(annotation: Any) -> type[Section] | None:
    """The section this type is, if it is one."""
    kind = unwrapped(annotation)
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def named_section_in(annotation: Any) -> type[Section] | None:
    """The section that stands under each name, if this type is a mapping of names to sections."""
    kind = unwrapped(annotation)
    return section_in(get_args(kind)[1]) if get_origin(kind) is dict else None


def inner_section(name: str, annotation: Any) -> tuple[type[Section], Path] | None:
    """The section that a field holds, once or under names, and its path from there."""
    if section := section_in(annotation):
        return section, (name,)
    if section := named_section_in(annotation):
        return section, (name, ANY_NAME)
    return None


def child_type(annotation: Any, part: str | int) -> Any:
    """The type of what stands under one key or list position, or `UNKNOWN`."""
    kind = unwrapped(annotation)
    if section := section_in(kind):
        info = section.model_fields.get(str(part))
        return UNKNOWN if info is None else info.rebuild_annotation()
    arguments = get_args(kind)
    if kind is Any:
        return Any
    if kind is dict or get_origin(kind) is dict:
        return arguments[1] if arguments else Any
    if get_origin(kind) is list and isinstance(part, int):
        return arguments[0]
    if get_origin(kind) is tuple and isinstance(part, int):
        if arguments[-1] is Ellipsis:
            return arguments[0]
        return arguments[part] if 0 <= part < len(arguments) else UNKNOWN
    return UNKNOWN


def type_at(path: Path) -> Any:
    """The type of the setting at a path, or `UNKNOWN`."""
    kind: Any = Config
    for part in path:
        kind = child_type(kind, part)
    return kind


def doc_at(path: Path) -> str:
    """The line of documentation of the setting at a path (of the nearest one above, for a part of a value)."""
    for end in range(len(path), 0, -1):
        section = section_in(type_at(path[: end - 1]))
        if section is not None and (info := section.model_fields.get(str(path[end - 1]))):
            return doc_of(info)
    return ""


def doc_of(info: FieldInfo) -> str:
    """A field's line of documentation; a section's is its docstring."""
    section = section_in(info.annotation)
    text = info.description or (section.__doc__ if section else "") or ""
    return " ".join(text.split())


def known_paths(section: type[Section] = Config, above: Path = ()) -> Iterator[Path]:
    """Every setting and section, in field order."""
    for name, info in section.model_fields.items():
        yield (*above, name)
        if inner := inner_section(name, info.annotation):
            yield from known_paths(inner[0], (*above, *inner[1]))


def describe_type(annotation: Any) -> str:
    """What a setting of this type takes, in plain words: "a whole number ≥ 1"."""
    if section := section_in(annotation):
        own = f"settings of its own: {', '.join(section.model_fields)}"
        return f"{section.short} alone, or {own}" if section.short else own
    if annotation is UNKNOWN:
        return "any value"
    return _describe_schema(TypeAdapter(annotation).json_schema())


def is_long_list(annotation: Any) -> bool:
    """Whether a setting of this type takes a list of any length."""
    kind = unwrapped(annotation)
    return get_origin(kind) is list or (get_origin(kind) is tuple and get_args(kind)[-1] is ...)


def choices(annotation: Any) -> list[str]:
    """The values a setting with fixed choices takes."""
    kind = unwrapped(annotation)
    return [str(choice) for choice in get_args(kind)] if str(get_origin(kind)) == "typing.Literal" else []


def unstated_limit(annotation: Any) -> float | None:
    """The largest value of a number's setting, where its words do not say it."""
    schema = TypeAdapter(annotation).json_schema()
    options = [schema, *schema.get("anyOf", ())]
    return next((option["maximum"] for option in options if option.get("maximum") in _UNSTATED), None)


def _describe_schema(schema: dict[str, Any]) -> str:
    if options := schema.get("anyOf"):
        return " or ".join(_describe_schema(option) for option in options)
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return either([f"`{choice}`" for choice in schema["enum"]])
    match schema.get("type"):
        case "integer":
            return "a whole number" + _bounds(schema)
        case "number":
            return "a number" + _bounds(schema)
        case "string":
            return "text"
        case "boolean":
            return "`true` or `false`"
        case "null":
            return "`null`"
        case "array" if "prefixItems" in schema:
            items = [_describe_schema(item) for item in schema["prefixItems"]]
            if len(set(items)) == 1:
                return f"a list of {len(items)}, each {items[0]}"
            return f"a list of {len(items)}: {', '.join(items)}"
        case "array":
            return f"a list of {_describe_schema(schema.get('items', {}))}"
        case "object":
            return "a mapping of names to values"
    return "any value"


_UNSTATED = (LARGEST, LARGEST_SEED, LONGEST_S, -math.inf)
"""Limits of what is absurd: every setting has them."""


def _bounds(schema: dict[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[key]:g}" for key, sign in signs.items() if key in schema and schema[key] not in _UNSTATED]
    return " " + " and ".join(bounds) if bounds else ""


def suggestions(path: Path) -> list[Path]:
    """Known settings that an unknown path may have meant.

    First the same name in another section (`lr` is `train.lr`), then near names in the section it was written in; if
    there are neither, settings whose line says the name (`learning_rate` is `train.lr`), or near names anywhere.
    """
    at = next(end for end in range(len(path)) if type_at(path[: end + 1]) is UNKNOWN)
    above, name, rest = path[:at], str(path[at]), path[at + 1 :]
    all_paths = list(known_paths())
    section = section_in(type_at(above))
    siblings = list(section.model_fields) if section else []

    last = spelling(str(path[-1]))
    found = [known for known in all_paths if spelling(str(known[-1])) == last and known != path]
    found = [known for known in found if ANY_NAME not in known] or found
    for match in near(name, siblings):
        longer = (*above, match, *rest)
        found.append((*above, match) if type_at(longer) is UNKNOWN else longer)
    if not found and len(last) > 3:
        mentions = re.compile(rf"\b{re.escape(last.replace('_', ' '))}\b", re.IGNORECASE)
        found = [known for known in all_paths if mentions.search(doc_at(known))][:3]
    if not found:
        leaves = {str(known[-1]): known for known in all_paths}
        found = [leaves[match] for match in near(str(path[-1]), list(leaves))]
    return list(dict.fromkeys(found))
