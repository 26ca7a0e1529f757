"""Digests of functions and objects: the same in every process, different when the code differs.

Pickles cannot be compared: their bytes depend on the history of the process. A digest covers the source without comments
and layout, everything the code refers to by name (functions, classes and plain values of the user's, not of packages),
default arguments and closures, and an object's attributes. For code without a source (an interactive session) and for a
lambda it covers the compiled code.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roll.config.user_code import is_user_file

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_MAX_VALUES = 10_000
"""Maximum number of values of a container that are included."""


def digest_of(value: Any) -> str:
    """The digest of a function, a class, an object or a list of values."""
    digest = hashlib.sha256()
    for line in _describe(value, {}):
        digest.update(line.encode("utf-8", "surrogatepass"))
        digest.update(b"\n")
    return digest.hexdigest()


def source_of(value: Any) -> str:
    """The source of the code, empty if there is none; for an object, the source of its class."""
    for candidate in (_unwrapped(value), type(value)):
        try:
            return inspect.getsource(candidate)
        except (OSError, TypeError):
            continue
    return ""


def file_of(value: Any) -> Path | None:
    """The file of the code, if it is in one."""
    for candidate in (_unwrapped(value), type(value)):
        try:
            file = Path(inspect.getfile(candidate))
        except (OSError, TypeError):
            continue
        if file.is_file() and is_user_file(file.resolve()):
            return file.resolve()
    return None


def _unwrapped(value: Any) -> Any:
    while isinstance(value, functools.partial | types.MethodType):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    return value


def _describe(value: Any, seen: dict[int, Any]) -> Iterator[str]:
    if isinstance(value, _PLAIN):
        yield f"{type(value).__name__} {value!r}"
        return
    if id(value) in seen:
        yield f"again {type(value).__name__}"
        return
    seen[id(value)] = value  # kept alive, so that no other value gets its id
    if isinstance(value, functools.partial):
        yield "partial"
        for part in (value.func, value.args, value.keywords):
            yield from _describe(part, seen)
    elif isinstance(value, types.MethodType):
        yield from _describe(value.__func__, seen)
        yield from _describe(value.__self__, seen)
    elif isinstance(value, types.FunctionType):
        yield from _function(value, seen)
    elif isinstance(value, type):
        yield from _class(value, seen)
    elif isinstance(value, types.ModuleType):
        yield f"module {value.__name__}"
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)}"
        for key in sorted(value, key=repr)[:_MAX_VALUES]:
            yield f"key {key!r}"
            yield from _describe(value[key], seen)
    elif isinstance(value, set | frozenset):
        yield f"set {sorted(map(repr, value))}"
    elif isinstance(value, list | tuple):
        yield f"list {len(value)}"
        for item in value[:_MAX_VALUES]:
            yield from _describe(item, seen)
    else:
        yield from _object(value, seen)


def _function(function: types.FunctionType, seen: dict[int, Any]) -> Iterator[str]:
    if not _is_user_code(function):
        yield f"function {function.__module__}.{function.__qualname__}"
        return
    yield f"function {function.__name__}"
    yield from _code(function, function.__code__)
    yield from _describe(function.__defaults__, seen)
    yield from _describe(function.__kwdefaults__, seen)
    for cell in function.__closure__ or ():
        try:
            yield from _describe(cell.cell_contents, seen)
        except ValueError:
            yield "empty cell"
    for name in sorted(_names(function.__code__)):
        if name in function.__globals__:
            yield f"global {name}"
            yield from _describe(function.__globals__[name], seen)


def _code(function: Any, code: types.CodeType) -> Iterator[str]:
    """The source as a syntax tree, or the compiled code if there is no source of its own."""
    if function.__name__ == "<lambda>":  # its source is the whole statement that contains it
        yield from _compiled(code)
        return
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        yield ast.dump(tree)
    except (OSError, TypeError, SyntaxError, ValueError):
        yield from _compiled(code)


def _compiled(code: types.CodeType) -> Iterator[str]:
    yield f"code {code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars}"
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _compiled(constant)
        elif isinstance(constant, frozenset):
            yield f"set {sorted(map(repr, constant))}"
        else:
            yield repr(constant)


def _names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _class(kind: type, seen: dict[int, Any]) -> Iterator[str]:
    yield f"class {kind.__qualname__}"
    if not _is_user_code(kind):
        yield kind.__module__
        return
    for name, value in sorted(vars(kind).items()):
        value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        value = value.fget if isinstance(value, property) else value
        if name == "_abc_impl" or (name.startswith("__") and not isinstance(value, types.FunctionType)):
            continue  # Python's bookkeeping, which changes while the class is used
        yield f"attribute {name}"
        yield from _describe(value, seen)
    for base in kind.__bases__:
        yield from _describe(base, seen)


def _object(value: Any, seen: dict[int, Any]) -> Iterator[str]:
    yield f"object {type(value).__qualname__}"
    yield from _class(type(value), seen)
    if hasattr(value, "tobytes"):  # arrays
        yield hashlib.sha256(value.tobytes()).hexdigest()
        return
    attributes = getattr(value, "__dict__", None)
    if attributes is None:
        slots = [slot for kind in type(value).__mro__ for slot in getattr(kind, "__slots__", ())]
        attributes = {slot: getattr(value, slot) for slot in slots if hasattr(value, slot)}
    if _is_user_code(type(value)) or type(value).__module__.startswith("roll."):
        yield from _describe(dict(attributes), seen)


def _is_user_code(code: Any) -> bool:
    """Whether a function or a class is the user's own; code without a file, as in a notebook, is."""
    module = getattr(code, "__module__", None) or ""
    if module == "builtins":
        return False
    if isinstance(code, types.FunctionType):
        file = Path(code.__code__.co_filename)
        return not file.is_file() or is_user_file(file.resolve())
    name = getattr(sys.modules.get(module), "__file__", None)
    if name is None:
        return module.partition(".")[0] not in sys.stdlib_module_names
    return is_user_file(Path(name).resolve())
