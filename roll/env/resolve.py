"""Resolves an environment's name to its factory.

A name is one of ROLL's own, a registered one (`@register("guess")`, or an entry point of the group `roll.environments` of
an installed package), a path to the class (`package.module:Class` or `path/to/file.py:Class`), or another library's
(`gymnasium:Taxi-v4`). A function that returns an environment can replace a class.

Only the module of the requested environment is imported, so an environment process imports only what its environments
need, and a package that one of them requires is not required by the others.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from roll.config.errors import UserError
from roll.config.registry import offered
from roll.config.secrets import KNOWN, resolved
from roll.config.suggest import did_you_mean
from roll.config.user_code import find_file, load_user_code, named_in_options

if TYPE_CHECKING:
    from roll.data.task import EnvSpec

Factory: TypeAlias = Callable[..., Any]
"""Creates an environment from a spec's options."""

F = TypeVar("F", bound=Factory)

GROUP = "roll.environments"
BUILT_IN = {
    "echo_turns": "roll.env.builtin",
    "frozen_lake": "roll.env.frozen_lake",
    "guess": "roll.env.builtin",
    "maths_retries": "roll.env.math_retry",
    "python": "roll.env.python_tool",
    "sokoban": "roll.env.sokoban",
    "webshop": "roll.env.webshop.env",
}
"""ROLL's own environments, and the modules that register them."""
LIBRARIES = {"gem": "roll.env.gem", "gymnasium": "roll.env.gymnasium_text"}
"""Libraries whose environments are named `library:name`, and the modules whose `factory_of(name)` returns their
factories."""
_REGISTRY: dict[str, Factory] = {}


def register(name: str) -> Callable[[F], F]:
    """Registers a class, or a function that creates environments, under a short name. The same code may run again, like a
    notebook cell: the newest definition is used."""

    def mark(factory: F) -> F:
        if name in BUILT_IN and factory.__module__ != BUILT_IN[name]:
            raise ValueError(f"the environment name {name!r} is taken by {BUILT_IN[name]}")
        registered = _REGISTRY.get(name)
        if registered is not None and _origin(registered) != _origin(factory):
            raise ValueError(f"the environment name {name!r} is taken by {_describe(registered)}")
        _REGISTRY[name] = factory
        return factory

    return mark


class EnvSpecError(UserError):
    """The environment exists, but cannot be created like this."""


def resolve(name: str, root: str | os.PathLike[str] | None = None) -> Factory:
    """The factory of environments with that name: registered, from a library, or the user's, searched from `root`. Raises
    `UserError` if there is none."""
    if name in BUILT_IN:
        _module(name, BUILT_IN[name])
    if name in _REGISTRY:
        return _check_factory(name, _REGISTRY[name])
    library, _, inner = name.partition(":")
    if library in LIBRARIES and inner:
        return _check_factory(name, _module(name, LIBRARIES[library]).factory_of(inner))
    installed = {} if ":" in name else offered(GROUP)
    what = f"environment {name!r} of an installed package, at" if name in installed else "environment"
    found = load_user_code(
        installed.get(name, name), what=what, known=sorted({*BUILT_IN, *_REGISTRY, *installed}), root=root
    )
    return _check_factory(name, found)


def portable_spec(spec: EnvSpec) -> EnvSpec:
    """The spec in a form that processes can use that never ran the `@register` of its environment: with the path of its
    code, or, for a notebook or a local function, with the pickled code. Raises `UserError` if it cannot be pickled."""
    if spec.code or spec.name in BUILT_IN or spec.name not in _REGISTRY:
        return spec
    factory = _REGISTRY[spec.name]
    file, module, name = _origin(factory)
    is_importable = "<" not in name and bool(file or module)
    return replace(spec, code=f"{file or module}:{name}" if is_importable else _pickle(spec.name, factory))


def load_factory(name: str, code: str | bytes, root: str) -> Factory:
    """The factory of a portable spec, in the process that receives it."""
    return pickle.loads(code) if isinstance(code, bytes) else resolve(code or name, root)


def resolve_options(name: str, options: Mapping[str, Any], root: str) -> dict[str, Any]:
    """An environment's options, with the files and functions that they name resolved from `root`."""
    found: dict[str, Any] = resolved(options, "tasks.options")
    KNOWN.learn(found)
    for option, kind in named_in_options(name).items():
        value = options.get(option)
        if isinstance(value, str) and value:
            found[option] = (
                str(find_file(value, root)) if kind == "file" else load_user_code(value, what=option, root=root)
            )
    return found


def check_options(name: str, factory: Factory, options: Mapping[str, Any]) -> None:
    """Raises `EnvSpecError` if the environment does not accept these options."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some callables written in C have none
        return
    try:
        signature.bind(**options)
    except TypeError as error:
        known = list(signature.parameters)
        takes = ", ".join(known) or "none"
        unknown = next((option for option in options if option not in known), "")
        raise EnvSpecError(
            f"environment {name!r}: {error}; its options are: {takes}{did_you_mean(unknown, known)}"
        ) from error


def _module(name: str, module: str) -> Any:
    """Imports a module of ROLL's own; raises `UserError` if a package that it needs is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "roll":
            raise
        raise UserError(
            f"environment {name!r} needs the package {missing}: run `pip install -e '.[envs]'` in ROLL's folder"
        ) from error


def _check_factory(name: str, factory: Factory) -> Factory:
    if inspect.iscoroutinefunction(factory):
        raise EnvSpecError(
            f"environment {name!r} is made by an `async def`: make it in a plain function, begin it in `reset`"
        )
    if inspect.isclass(factory):
        _check_methods(name, factory)
    return factory


def _check_methods(name: str, kind: type) -> None:
    for method, call, arguments in (("reset", "reset(seed=…)", {"seed": 0}), ("step", "step(action)", {})):
        function = getattr(kind, method, None)
        if not callable(function) or method in getattr(kind, "__abstractmethods__", ()):
            raise EnvSpecError(f"environment {name!r}: the class {kind.__name__} has no method {method}")
        signature = inspect.signature(function)
        try:
            signature.bind(*((None,) if arguments else (None, "")), **arguments)
        except TypeError as error:
            raise EnvSpecError(
                f"environment {name!r}: {method} takes {signature}, but is called as {call}: {error}"
            ) from error


def _describe(factory: Factory) -> str:
    return f"{factory.__module__}.{getattr(factory, '__qualname__', factory)}"


def _pickle(name: str, factory: Factory) -> bytes:
    import cloudpickle

    try:
        return cast(bytes, cloudpickle.dumps(factory))
    except Exception as error:
        raise UserError(
            f"environment {name!r} cannot be sent to a process ({type(error).__name__}: {error}): put it at the top "
            "level of a file, and write `path/to/file.py:name`"
        ) from error


def _origin(factory: Factory) -> tuple[str, str, str]:
    """The file of the factory, or for a package its module; and its name there. Another process cannot import a script as
    a module, and finds a module next to a script only by its file."""
    module = sys.modules.get(factory.__module__)
    spec = getattr(module, "__spec__", None)
    imported = spec.name if spec is not None else factory.__module__  # with `python -m package.module`, not `__main__`
    name = getattr(factory, "__qualname__", "<nameless>")
    if "." in imported or hasattr(module, "__path__"):
        return "", imported, name
    file = getattr(module, "__file__", None)
    if file is not None and os.path.isfile(file):
        return os.path.realpath(file), "", name
    return "", "" if imported == "__main__" else imported, name
