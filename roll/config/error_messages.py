"""The mistakes of a configuration, one line each: where the setting was written, its value, and what to write instead."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from roll.config.renames import setting
from roll.config.schema_tree import (
    UNKNOWN,
    choices,
    describe_type,
    doc_at,
    dotted,
    is_long_list,
    named_section_in,
    section_in,
    suggestions,
    type_at,
    unstated_limit,
    unwrapped,
)
from roll.config.secrets import name_at, redacted
from roll.config.suggest import either, near
from roll.config.yaml_document import Path

_EXPLAINED_BY_TYPE = re.compile(
    r".*_(type|parsing|parsing_size|from_float)$|(greater|less)_than(_equal)?$|finite_number$"
)
_VALUE_CHARS = 60


class Origin(NamedTuple):
    """Where a value was written; origins sort as the user reads: the file's lines, then the overrides."""

    rank: int
    label: str


class Mistake(NamedTuple):
    origin: Origin
    text: str

    def __str__(self) -> str:
        return f"{self.origin.label}: {self.text}" if self.origin.label else self.text


def format_value(value: Any) -> str:
    """A value as the user may have written it, cut to fit a line."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except (ValueError, RecursionError):  # a number of thousands of digits, a list that holds itself
        text = f"a {type(value).__name__}"
    return text if len(text) <= _VALUE_CHARS else text[: _VALUE_CHARS - 1] + "…"


def format_bare_value(value: Any) -> str:
    """A value as YAML takes it, text without quotes."""
    return value if isinstance(value, str) and value else format_value(value)


def unknown_key(path: Path) -> str:
    """The message for a key that is not a setting."""
    path = (*path[:-1], str(path[-1]))
    if (now := setting(dotted(path))) is not None:
        return f"{dotted(path)} has another name: write {now}"
    text = f"{dotted(path)} is not a setting"
    section_path: Path = ()
    for end in range(1, len(path)):
        kind = type_at(path[:end])
        if kind is UNKNOWN:
            break
        if section_in(kind) is None and named_section_in(kind) is None:
            leaf = dotted(path[:end])
            return f"{text}: {leaf} takes {describe_type(kind)}, which has no parts"
        section_path = path[:end]
    if found := suggestions(path):
        return f"{text}; did you mean {either([dotted(known) for known in found])}?"
    section = section_in(type_at(section_path))
    known = ", ".join(section.model_fields) if section else ""
    return f"{text}; {dotted(section_path) + ' has' if section_path else 'there are'}: {known}"


def wrong_value(path: Path, value: Any) -> str:
    """The message for a value that its setting does not accept."""
    kind = type_at(path)
    value = redacted(value, name_at(path))
    text = f"{dotted(path)} is {format_value(value)}, but takes {describe_type(kind)}"
    if unwrapped(kind) in (int, float) and (limit := unstated_limit(kind)) is not None and _exceeds(value, limit):
        text += f", at most {limit:,.0f}"
    elif isinstance(value, float) and not math.isfinite(value):
        text += ", and a finite one"
    if unwrapped(kind) is str and isinstance(value, (bool, int, float)):
        text += ": write it in quotes"
    if is_long_list(kind) and isinstance(value, (str, int, float)):
        text += f": write {format_value([value])}"
    if matches := near(str(value), choices(kind)):
        text += f"; did you mean `{matches[0]}`?"
    return f"{text} ({line})" if (line := doc_at(path)) else text


def _exceeds(value: Any, limit: float) -> bool:
    try:
        return float(value) > limit
    except OverflowError:
        return True
    except (TypeError, ValueError):
        return False


def mistakes_of(error: ValidationError, origins: Mapping[Path, Origin], default_origin: Origin) -> list[Mistake]:
    """Every mistake of a failed validation; `whole` is the origin of what stands nowhere in particular."""
    found: dict[Path | str, Mistake] = {}
    for detail in error.errors(include_url=False):
        path = _path_of(detail)
        if "error" in detail.get("ctx", {}):
            for text in _with_full_path(str(detail["ctx"]["error"]), path).splitlines():
                found[text] = Mistake(_origin_of_mentioned(text, origins, default_origin), text)
        elif path not in found:
            found[path] = Mistake(origin_at(path, origins, default_origin), _message_of(detail, path))
    return list(found.values())


def _with_full_path(text: str, path: Path) -> str:
    """What a section says of its settings, by the name it usually has, where it stands in another."""
    if len(path) < 2:
        return text
    return re.sub(rf"(?<![\w.]){re.escape(str(path[-1]))}\.", f"{dotted(path)}.", text)


def origin_at(path: Path, origins: Mapping[Path, Origin], default_origin: Origin) -> Origin:
    """Where a value, or the nearest thing around it, was written."""
    return next((origins[path[:end]] for end in range(len(path), 0, -1) if path[:end] in origins), default_origin)


def _path_of(detail: ErrorDetails) -> Path:
    """The place to name: a list of the wrong length is named whole, not its missing or surplus element."""
    path: Path = detail["loc"]
    if path and isinstance(path[-1], int) and detail["type"] == "missing":
        return path[:-1]
    return path


def _message_of(detail: ErrorDetails, path: Path) -> str:
    name, kind = dotted(path), type_at(path)
    if detail["type"] in ("extra_forbidden", "invalid_key"):
        return unknown_key(path)
    if path[-1] == "[key]":
        return f"{dotted(path[:-2])} has the key {format_value(path[-2])}, but keys are text: write it in quotes"
    if detail["type"] == "missing" and path == detail["loc"]:
        return f"{name} must be set: it takes {describe_type(kind)} ({doc_at(path)})"
    value = redacted(detail["input"], name_at(path))
    length = detail["type"] in ("missing", "too_long", "too_short")
    if kind is not UNKNOWN and (length or choices(kind) or _EXPLAINED_BY_TYPE.match(detail["type"])):
        return wrong_value(path, value)
    if detail["type"] == "string_pattern_mismatch" and path[-1] == "mode":
        takes = "three octal digits of which the first is 7, as in 0750"
        return f"{name} is {format_value(value)}, but takes {takes} ({doc_at(path)})"
    reason = re.sub(r"^.*?\bshould\b", "it should", detail["msg"])
    line = doc_at(path)
    return f"{name} is {format_value(value)}: {reason}" + (f" ({line})" if line else "")


def _origin_of_mentioned(text: str, origins: Mapping[Path, Origin], default_origin: Origin) -> Origin:
    """Where the settings named in a message were written, all of them."""
    named = [tuple(word.split(".")) for word in re.findall(r"[a-z_]\w*(?:\.[a-z_]\w*)+", text)]
    written = sorted({origins[path] for path in named if path in origins})
    if not written:
        return default_origin
    return Origin(written[0].rank, ", ".join(origin.label for origin in written))
