"""Code that a user names in a configuration: `package.module:name` or `path/to/file.py:name`.

Everything that takes such a name takes it by this loader, so that all of them look in the same places and refuse in the
same words. Importing this module loads little: processes that start often use it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from roll.config.errors import UserError
from roll.config.suggest import did_you_mean, either

_INSTALLED = {"site-packages", "dist-packages"}
SENT_FOLDER = "ROLL_SENT_FOLDER"
"""The environment variable by which the workers of a cluster know which folder their working directory is a copy of."""
_IN_OPTIONS: Mapping[str, Mapping[str, Literal["file", "code"]]] = {
    "maths_retries": {"problems": "file"},
    "webshop": {"data": "file"},
    "gymnasium": {"show": "code", "read": "code"},
}
FORMS = ("`package.module:name`", "`path/to/file.py:name`")


def load_user_code(text: str, *, what: str, known: Iterable[str] = (), root: str | os.PathLike[str] | None = None) -> Any:
    """The function or class that `text` names; `UserError` if there is none.

    `what` is what it is for, as the user knows it (`reward`, `rollout.filter`), and `known` are the names that would have
    done without a colon: both are for the message. Modules and relative files are looked for from `root`, the folder of
    the configuration, by default the working directory. It goes to the front of `sys.path`, as does the folder of a file,
    which may import its neighbours as a script may. A file runs once in a process, whoever names it; if it failed, again.
    """
    module_or_file, _, attribute = text.rpartition(":")
    if not module_or_file or not attribute:
        choices = list(known)
        raise UserError(f"{what} {text!r} is not known: write {either([*choices, *FORMS])}{did_you_mean(text, choices)}")
    folder = working_copy(root)
    try:
        module = (
            _run_file(module_or_file, folder)
            if module_or_file.endswith(".py") or "/" in module_or_file
            else _import(module_or_file, folder)
        )
        return _get(module, attribute)
    except _CodeNotFound as error:
        raise UserError(f"{what} {text!r}: {error}") from error.__cause__


def working_copy(root: str | os.PathLike[str] | None) -> Path:
    """The folder `root` as it is on this machine: itself, or on another node of a cluster the copy that Ray has made of
    it, which is in the working directory. Without a root it is the working directory."""
    if not root:
        return Path.cwd()
    folder = Path(root)
    if folder.is_dir():
        return folder
    sent = os.environ.get(SENT_FOLDER)
    return Path.cwd() / folder.relative_to(sent) if sent and folder.is_relative_to(sent) else Path.cwd()


def find_file(name: str, root: str | os.PathLike[str] | None) -> Path:
    """Where a file that a configuration names is, or would be."""
    return Path(os.path.normpath(working_copy(root) / Path(name).expanduser()))


def named_in_options(environment: str) -> Mapping[str, Literal["file", "code"]]:
    """The options of ROLL's own environments, and of a library's, that name files or code."""
    return _IN_OPTIONS.get(environment.partition(":")[0], {})


def format_path(path: Path) -> Path:
    """A path as short as it can be read from here: relative to the working directory where it is inside."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


class _CodeNotFound(Exception):
    """Why there is no such code."""


def _run_file(written: str, folder: Path) -> ModuleType:
    path = (folder / Path(written).expanduser()).resolve()
    name = f"roll_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        files = [other.name for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise _CodeNotFound(
            f"there is no file {path}{working_directory_hint(written, folder) or did_you_mean(path.name, files)}"
        )
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise _CodeNotFound(f"{path} is not a Python file: write {either(FORMS)}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up here
    try:
        with imports_from(folder, path.parent):
            spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception):
            raise
        raise _CodeNotFound(f"running {path} failed: {_describe(error)}") from error
    return module


def _import(name: str, folder: Path) -> ModuleType:
    try:
        with imports_from(folder):
            return importlib.import_module(name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{name}.".startswith(f"{missing}."):
            hint = working_directory_hint(f"{missing.partition('.')[0]}.py", folder) or working_directory_hint(
                missing.partition(".")[0], folder
            )
            raise _CodeNotFound(f"there is no module {missing!r} in {folder} or on sys.path{hint}") from error
        raise _CodeNotFound(f"importing {name} failed: {_describe(error)}") from error


def _get(module: ModuleType, attribute: str) -> Any:
    where = module.__file__ or module.__name__
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
            listed = f"; it has {', '.join(public)}" if public else ""
            raise _CodeNotFound(f"{where} has no {part!r}{did_you_mean(part, public) or listed}")
        found = getattr(found, part)
    if not callable(found):
        raise _CodeNotFound(f"{attribute} of {where} is a {type(found).__name__}, not a function or class")
    return found


def working_directory_hint(written: str, folder: Path) -> str:
    """For a message: that a file which is not in `folder` is in the working directory, and how to name it then."""
    working_directory = Path.cwd()
    if (
        os.path.isabs(os.path.expanduser(written))
        or not (working_directory / written).exists()
        or working_directory == folder
    ):
        return ""
    name = os.path.relpath(working_directory / written, folder)
    return (
        f"; there is {written} in the working directory, but names in a YAML file are relative to its folder: "
        f"write {name}"
    )


@contextmanager
def imports_from(*folders: Path) -> Iterator[None]:
    """Has imports look in folders before all others, the last one first, without the modules of the same names that came
    from elsewhere: a file imports its own neighbours, also after a file of another folder has imported its own. Those
    others are back afterwards: a program that has imported them keeps using them."""
    hidden_modules: dict[str, ModuleType] = {}
    for folder in folders:
        hidden_modules |= _put_first(folder)
    try:
        yield
    finally:
        sys.modules.update(hidden_modules)


def _put_first(folder: Path) -> dict[str, ModuleType]:
    """Has imports look in a folder before all others, and takes out modules of the same names that came from elsewhere,
    which it returns."""
    importlib.invalidate_caches()
    removed: dict[str, ModuleType] = {}
    while str(folder) in sys.path:
        sys.path.remove(str(folder))
    sys.path.insert(0, str(folder))
    if not folder.is_dir():
        return removed
    module_names = {
        entry.stem if entry.suffix == ".py" else entry.name
        for entry in folder.iterdir()
        if entry.name.isidentifier() or entry.suffix == ".py"
    }
    for name in module_names & {name for name in sys.modules if "." not in name} - {"__main__"}:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and is_user_file(Path(file)) and not Path(file).resolve().is_relative_to(folder.resolve()):
            for inside in [known for known in sys.modules if known == name or known.startswith(f"{name}.")]:
                removed[inside] = sys.modules.pop(inside)
    return removed


def is_user_file(file: Path) -> bool:
    """Whether a module's file is the user's own: none of Python's, of an installed package, or of ROLL."""
    return not any(file.is_relative_to(folder) for folder in _library_folders()) and not _INSTALLED & set(file.parts)


@functools.cache
def _library_folders() -> tuple[Path, ...]:
    package = Path(__file__).resolve().parents[1]
    return (package, *(Path(path) for path in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}))


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
