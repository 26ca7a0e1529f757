"""YAML text to plain data and back.

Values follow YAML 1.2 where 1.1 surprises: `1e-6` is a number, `no` and `on` are text, `010` is ten, a date is text.
What `write` writes, `parse` reads back equal, and so does a YAML 1.1 reader, floats such as `1e-06` aside.

What always holds: a text costs no more than its own size to read. Aliases are followed only as long as what they make is
small: a few hundred bytes of them can stand for gigabytes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]
"""Where a value stands: the keys and list positions that lead to it."""

MAX_BYTES = 1 << 20
_MAX_VALUES = 50_000
"""As they are written, and with aliases written out; that many take some seconds to read."""
_CHARS_PER_VALUE = 32
"""So much of a long text counts as a value."""
_MAX_DEPTH = 64
_TAG = "tag:yaml.org,2002:"
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?[0-9][0-9_]*$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_BREAKS = re.compile("[\n\r\x85\u2028\u2029\ufeff]")
_RESOLVERS = (
    ("null", _NULL, ["~", "n", "N", ""]),
    ("bool", _BOOL, list("tTfF")),
    ("int", _INT, list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
)


class YamlError(Exception):
    """Text that is not the YAML a configuration may be written in; `line` counts from 1, 0 when unknown."""

    def __init__(self, problem: str, line: int = 0, column: int = 0) -> None:
        super().__init__(problem)
        self.problem, self.line, self.column = problem, line, column


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (PyYAML copies it on the first change)
    composed = 0
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.composed += 1
        if self.composed > _MAX_VALUES:
            raise YamlError(f"this is more than {_MAX_VALUES:,} values", self.line + 1)
        if self.depth > _MAX_DEPTH:
            raise YamlError(f"nested more than {_MAX_DEPTH} deep", self.line + 1)
        self.depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # Only double quotes escape line breaks; the other styles fold the rarer ones.
        style = '"' if _BREAKS.search(data) else None
        return self.represent_scalar(f"{_TAG}str", data, style=style)

    def represent_float(self, data: float) -> yaml.ScalarNode:
        return self.represent_scalar(f"{_TAG}float", _float_text(data))

    def represent_list(self, data: Any) -> yaml.SequenceNode:
        inline = not any(isinstance(item, (list, tuple, dict)) for item in data)
        return self.represent_sequence(f"{_TAG}seq", data, flow_style=inline)


for _name, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, _first)
    _Dumper.add_implicit_resolver(_TAG + _name, _pattern, _first)
_Dumper.add_representer(str, _Dumper.represent_str)
_Dumper.add_representer(float, _Dumper.represent_float)
_Dumper.add_representer(list, _Dumper.represent_list)
_Dumper.add_representer(tuple, _Dumper.represent_list)


def _float_text(value: float) -> str:
    if math.isnan(value):
        return ".nan"
    if math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    return repr(value)


@dataclass
class Document:
    """The data of a YAML text, the line each value stands on, and keys that were written twice."""

    data: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    repeated: list[tuple[Path, int, int]] = field(default_factory=list)
    """(key, its line, the line it was first written on)"""
    values: int = 0
    """How many were built."""

    def build(self, node: yaml.Node, path: Path, above: tuple[int, ...] = ()) -> Any:
        if id(node) in above:
            raise _error_at(node, "this alias stands inside the value it names")
        self.values += 1 + (len(node.value) // _CHARS_PER_VALUE if isinstance(node, yaml.ScalarNode) else 0)
        if self.values > _MAX_VALUES:
            raise _error_at(node, f"with its aliases written out, this is more than {_MAX_VALUES:,} values")
        if len(path) > _MAX_DEPTH:
            raise _error_at(node, f"nested more than {_MAX_DEPTH} deep")
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
            return self._build_mapping(node, path, (*above, id(node)))
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            items = []
            for position, item in enumerate(node.value):
                self.lines[*path, position] = item.start_mark.line + 1
                items.append(self.build(item, (*path, position), (*above, id(node))))
            return items
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node)
        raise _error_at(node, f"the tag {node.tag.replace(_TAG, '!!')} is not for configurations: leave it out")

    def _build_mapping(self, node: yaml.MappingNode, path: Path, above: tuple[int, ...]) -> dict[Any, Any]:
        mapping: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _error_at(key_node, "a key must be a single word, not a list or a mapping")
            if key_node.value == "<<" and key_node.style is None:
                raise _error_at(key_node, "the merge key << is not read: write its settings out")
            key, line = _scalar(key_node), key_node.start_mark.line + 1
            key_path = (*path, key)
            if key in mapping:
                self.repeated.append((key_path, line, self.lines[key_path]))
                continue
            self.lines[key_path] = line
            mapping[key] = self.build(value_node, key_path, above)
        return mapping


def parse(text: str) -> Document:
    """Read YAML text; raises `YamlError`."""
    document = Document()
    if len(text) > MAX_BYTES:
        raise YamlError(f"it is longer than {MAX_BYTES >> 20} MiB, which no configuration is")
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
        document.data = None if node is None else document.build(node, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "unreadable"
        context = f" {error.context}" if error.context and error.problem else ""
        if "'\\t'" in problem:
            problem, context = "a tab cannot indent YAML: use spaces", ""
        raise YamlError(problem + context, mark.line + 1 if mark else 0, mark.column + 1 if mark else 0) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(f"the character {chr(error.character)!r} is not allowed", line) from None
    return document


def write(data: Any) -> str:
    """YAML of plain data, keys in their order; raises `YamlError` on what YAML cannot hold."""
    try:
        return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=False)
    except yaml.representer.RepresenterError as error:
        raise YamlError(f"{error.args[-1]!r} is no plain value") from None


def _scalar(node: yaml.ScalarNode) -> Any:
    text, tag = node.value, node.tag.removeprefix(_TAG)
    try:
        match tag:
            case "str":
                return text
            case "null":
                return None
            case "bool":
                return {"true": True, "false": False}[text.lower()]
            case "int":
                return int(text.replace("_", ""))
            case "float":
                digits = text.replace("_", "").lower()
                number = float(digits.replace(".inf", "inf").replace(".nan", "nan"))
                if math.isinf(number) and "inf" not in digits:
                    raise _error_at(node, f"{text[:40]!r} is beyond what a number can hold, 1.8e308")
                return number
    except (KeyError, ValueError):
        raise _error_at(node, f"{text[:40]!r} cannot be read as {tag}") from None
    raise _error_at(node, f"the tag {node.tag.replace(_TAG, '!!')} is not for configurations: leave it out")


def _error_at(node: yaml.Node, problem: str) -> YamlError:
    return YamlError(problem, node.start_mark.line + 1, node.start_mark.column + 1)
