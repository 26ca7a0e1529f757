"""Code that a user names in a configuration: `package.module:name` or `path/to/file.py:name`.

Everything that takes such a name takes it by this loader, so that all of them look in the same places and refuse in the
same words. Importing this module loads little: processes that start often use it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from roll.config.errors import UserError
from roll.config.names import did_you_mean, either

_FORMS = ("`package.module:name`", "`path/to/file.py:name`")


def load_user_code(text: str, *, what: str, known: Iterable[str] = (), root: str | os.PathLike[str] | None = None) -> Any:
    """The function or class that `text` names; `UserError` if there is none.

    `what` is what it is for, as the user knows it (`reward`, `rollout.filter`), and `known` are the names that would have
    done without a colon: both are for the message. Modules and relative files are looked for from `root`, by default the
    current folder. It goes to the front of `sys.path`, as does the folder of a file, which may import its neighbours as
    a script may. A file runs once in a process, whoever names it; if it failed, again.
    """
    place, _, attribute = text.rpartition(":")
    if not place or not attribute:
        choices = list(known)
        raise UserError(f"{what} {text!r} is not known: write {either([*choices, *_FORMS])}{did_you_mean(text, choices)}")
    folder = Path.cwd() if root is None or not Path(root).is_dir() else Path(root)  # another machine has its own copy
    try:
        module = _run_file(folder / place) if place.endswith(".py") or "/" in place else _import(place, folder)
        return _get(module, attribute)
    except _Unfound as error:
        raise UserError(f"{what} {text!r}: {error}") from error.__cause__


class _Unfound(Exception):
    """Why there is no such code."""


def _run_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    name = f"roll_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        others = [other.name for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise _Unfound(f"there is no file {path}{did_you_mean(path.name, others)}")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise _Unfound(f"{path} is not a Python file: write {either(_FORMS)}")
    _join_path(path.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up here
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception):
            raise
        raise _Unfound(f"running {path} failed: {_described(error)}") from error
    return module


def _import(name: str, folder: Path) -> ModuleType:
    _join_path(folder)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{name}.".startswith(f"{missing}."):
            raise _Unfound(f"there is no module {missing!r} in {folder} or on sys.path") from error
        raise _Unfound(f"importing {name} failed: {_described(error)}") from error


def _get(module: ModuleType, attribute: str) -> Any:
    where = module.__file__ or module.__name__
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
            listed = f"; it has {', '.join(public)}" if public else ""
            raise _Unfound(f"{where} has no {part!r}{did_you_mean(part, public) or listed}")
        found = getattr(found, part)
    if not callable(found):
        raise _Unfound(f"{attribute} of {where} is a {type(found).__name__}, not a function or class")
    return found


def _join_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
