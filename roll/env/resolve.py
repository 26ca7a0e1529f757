"""From an environment's name to what makes it.

A name is one that was registered (`@register("guess")`, or an entry point of the group `roll.environments` of an
installed package), or says where the class is: `package.module:Class` or `path/to/file.py:Class`. In place of a class,
a function that returns an environment will do.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

if TYPE_CHECKING:
    from roll.data.task import EnvSpec

Factory: TypeAlias = Callable[..., Any]
"""Makes an environment from a spec's options."""

F = TypeVar("F", bound=Factory)

GROUP = "roll.environments"
_FORMS = "write `package.module:Class` or `path/to/file.py:Class`"
_REGISTRY: dict[str, Factory] = {}


def register(name: str) -> Callable[[F], F]:
    """Gives a class, or a function that makes environments, a short name."""

    def mark(factory: F) -> F:
        if _REGISTRY.setdefault(name, factory) is not factory:
            raise ValueError(f"the environment name {name!r} is taken by {_described(_REGISTRY[name])}")
        return factory

    return mark


class Unfit(Exception):
    """There is no such environment, or it cannot be made that way. The message is for the user."""


def resolve(name: str, root: str | os.PathLike[str] | None = None) -> Factory:
    """What makes environments of that name; `UserError` says what was not found and what is near.

    Modules and relative files are looked for from `root`, by default the current folder. It goes to the front of
    `sys.path`, as does the folder of a file, which may import its neighbours as a script may.
    """
    with _told_to_the_user():
        return find(name, root)


def check(spec: EnvSpec, root: str | os.PathLike[str] | None = None) -> None:
    """Holds that the spec's environment is there and takes its options: `UserError` if not. Makes none."""
    with _told_to_the_user():
        check_options(spec.name, find(spec.name, root), spec.options)


def find(name: str, root: str | os.PathLike[str] | None = None) -> Factory:
    """As `resolve`, for environment processes: raises `Unfit`."""
    place, colon, attribute = name.rpartition(":")
    if not colon:
        return _checked(name, _registered(name))
    if not place or not attribute:
        raise Unfit(f"environment {name!r} lacks a part: {_FORMS}")
    folder = Path.cwd() if root is None or not Path(root).is_dir() else Path(root)  # another machine has its own copy
    is_file = place.endswith(".py") or "/" in place
    module = _load_file(name, folder / place) if is_file else _import(name, place, folder)
    return _checked(name, _get(name, module, attribute))


def check_options(name: str, factory: Factory, options: Mapping[str, Any]) -> None:
    """`Unfit` if the environment cannot be made with these options."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some callables written in C have none
        return
    try:
        signature.bind(**options)
    except TypeError as error:
        known = list(signature.parameters)
        takes = ", ".join(known) or "none"
        odd = next((option for option in options if option not in known), "")
        raise Unfit(f"environment {name!r}: {error}{_near(odd, known)}; its options are: {takes}") from error


@contextlib.contextmanager
def _told_to_the_user() -> Iterator[None]:
    try:
        yield
    except Unfit as error:
        from roll.config.errors import UserError  # not above: `roll.config` brings pydantic, half of a process's start

        raise UserError(str(error)) from error.__cause__


def _registered(name: str) -> Factory:
    import roll.env.builtin  # noqa: F401 (registers)

    if name in _REGISTRY:
        return _REGISTRY[name]
    from importlib.metadata import entry_points

    offered = {point.name: point for point in entry_points(group=GROUP)}
    if name not in offered:
        known = sorted({*_REGISTRY, *offered})
        listed = ", ".join(map(repr, known))
        raise Unfit(f"environment {name!r} is not known: there is {listed}{_near(name, known)}; for your own, {_FORMS}")
    try:
        return cast(Factory, offered[name].load())
    except Exception as error:
        raise Unfit(f"environment {name!r}: loading {offered[name].value} failed: {_told(error)}") from error


def _load_file(name: str, path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        names = sorted(other.name for other in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise Unfit(f"environment {name!r}: there is no file {path}{_near(path.name, names)}")
    module_name = f"roll_env_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise Unfit(f"environment {name!r}: {path} is not a Python file: {_FORMS}")
    _join_path(path.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up here
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise Unfit(f"environment {name!r}: running {path} failed: {_told(error)}") from error
    return module


def _import(name: str, module_name: str, folder: Path) -> ModuleType:
    _join_path(folder)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            where = f"in {folder} or on sys.path"
            raise Unfit(f"environment {name!r}: there is no module {error.name!r} {where}") from error
        raise Unfit(f"environment {name!r}: importing {module_name} failed: {_told(error)}") from error
    except Exception as error:
        raise Unfit(f"environment {name!r}: importing {module_name} failed: {_told(error)}") from error


def _get(name: str, module: ModuleType, attribute: str) -> Any:
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
            where = module.__file__ or module.__name__
            raise Unfit(f"environment {name!r}: {where} has no {part!r}{_near(part, public)}")
        found = getattr(found, part)
    return found


def _checked(name: str, factory: Any) -> Factory:
    if not callable(factory):
        raise Unfit(f"environment {name!r} is a {type(factory).__name__}: it must be a class with reset and step")
    if inspect.iscoroutinefunction(factory):
        raise Unfit(f"environment {name!r} is made by an `async def`: make it in a plain function, begin it in `reset`")
    if inspect.isclass(factory):
        _check_methods(name, factory)
    return cast(Factory, factory)


def _check_methods(name: str, kind: type) -> None:
    for method, call, arguments in (("reset", "reset(seed=…)", {"seed": 0}), ("step", "step(action)", {})):
        function = getattr(kind, method, None)
        if not callable(function) or method in getattr(kind, "__abstractmethods__", ()):
            raise Unfit(f"environment {name!r}: the class {kind.__name__} has no method {method}")
        signature = inspect.signature(function)
        try:
            signature.bind(*((None,) if arguments else (None, "")), **arguments)
        except TypeError as error:
            raise Unfit(f"environment {name!r}: {method} takes {signature}, but is called as {call}: {error}") from error


def _join_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _near(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(map(repr, matches))}?)" if matches else ""


def _described(factory: Factory) -> str:
    return f"{factory.__module__}.{getattr(factory, '__qualname__', factory)}"


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
