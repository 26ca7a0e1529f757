"""From what the user wrote to a reward function: a built-in's name, `package.module:function` or `file.py:function`."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import pickle
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from roll.reward.base import RewardFn
from roll.reward.builtin import BUILTINS, WARM_UPS

if TYPE_CHECKING:
    from roll.config.errors import UserError

_FORMS = "write `package.module:function` or `path/to/file.py:function`"


def resolve(name: str, root: str | os.PathLike[str] | None = None) -> RewardFn:
    """The reward function of that name; `UserError` says what was not found and what is near.

    Modules and relative files are looked for from `root`, by default the current folder. It goes to the front of
    `sys.path`, as does the folder of a file, which may import its neighbours as a script may.
    """
    if name in BUILTINS:
        return BUILTINS[name]
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise _refused(
            f"reward {name!r} is not known: the built-in rewards are {_listed(BUILTINS)}{_near(name, BUILTINS)}; "
            f"for your own, {_FORMS}"
        )
    folder = Path.cwd() if root is None or not Path(root).is_dir() else Path(root)  # another machine has its own copy
    is_file = place.endswith(".py") or "/" in place
    module = _load_file(name, folder / place) if is_file else _import(name, place, folder)
    return _checked(name, _get(name, module, attribute))


@dataclass(frozen=True)
class RewardSource:
    """A reward function in a form that travels to a process: its name, or itself, pickled by value where it must be.

    A function of `__main__` or of a notebook can only travel pickled; it takes along the variables it uses.
    """

    label: str
    root: str
    pickled: bytes | None = None

    @classmethod
    def of(cls, reward: str | RewardFn) -> RewardSource:
        """The source of a name or of a function. Names are looked at by `check`, not here."""
        if isinstance(reward, str):
            return cls(reward, os.getcwd())
        import cloudpickle

        label = getattr(reward, "__qualname__", type(reward).__qualname__)
        _checked(label, reward)
        try:
            return cls(label, os.getcwd(), cast(bytes, cloudpickle.dumps(reward)))
        except Exception as error:
            raise _refused(
                f"reward function {label!r} cannot be sent to a grader process ({type(error).__name__}: {error}): "
                "let it create files, locks and connections when it is called"
            ) from error

    def check(self) -> None:
        """Load the function here and now: a wrong name then costs a second, not a started run."""
        self._function()

    def load(self) -> RewardFn:
        """The function, ready for its first job: a grader process calls this once."""
        function = self._function()
        if self.pickled is None and self.label in WARM_UPS:
            WARM_UPS[self.label]()
        return function

    def _function(self) -> RewardFn:
        if self.pickled is None:
            return resolve(self.label, self.root)
        return cast(RewardFn, pickle.loads(self.pickled))


def _load_file(name: str, path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        names = sorted(other.name for other in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise _refused(f"reward {name!r}: there is no file {path}{_near(path.name, names)}")
    module_name = f"roll_reward_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise _refused(f"reward {name!r}: {path} is not a Python file: {_FORMS}")
    _join_path(path.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up here
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise _refused(f"reward {name!r}: running {path} failed: {_described(error)}") from error
    return module


def _import(name: str, module_name: str, folder: Path) -> ModuleType:
    _join_path(folder)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise _refused(f"reward {name!r}: there is no module {missing!r} in {folder} or on sys.path") from error
        raise _refused(f"reward {name!r}: importing {module_name} failed: {_described(error)}") from error
    except Exception as error:
        raise _refused(f"reward {name!r}: importing {module_name} failed: {_described(error)}") from error


def _get(name: str, module: ModuleType, attribute: str) -> Any:
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
            where = module.__file__ or module.__name__
            raise _refused(f"reward {name!r}: {where} has no {part!r}{_near(part, public)}")
        found = getattr(found, part)
    return found


def _checked(name: str, function: Any) -> RewardFn:
    if not callable(function):
        raise _refused(
            f"reward {name!r} is a {type(function).__name__}: a reward is a function (task, response) -> float"
        )
    if inspect.iscoroutinefunction(function):
        raise _refused(f"reward {name!r} is an `async def`: a reward is a plain `def` (it runs in its own process)")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables written in C have none
        return cast(RewardFn, function)
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise _refused(f"reward {name!r} takes {signature}, but is called as (task, response): {error}") from error
    return cast(RewardFn, function)


def _join_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _near(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(map(repr, matches))}?)" if matches else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _refused(message: str) -> UserError:
    from roll.config.errors import UserError  # not above: `roll.config` brings pydantic, half of a process's start

    return UserError(message)
