"""Group filters: which finished groups are worth training on. A filter names its reason, or None to keep the group.

A user's filter is a function of a group that gives a reason or None, or says whether to keep it: True or False.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

from roll.config.errors import RunError, UserError
from roll.data.sample import Group

Filter = Callable[[Group], str | None]


def no_signal(group: Group) -> str | None:
    """Samples with equal rewards have no advantage over each other."""
    rewards = {sample.reward for sample in group.scored}
    return "no signal: all rewards equal" if len(rewards) < 2 else None


def keep_all(group: Group) -> str | None:
    return None


def mean_range(low: float, high: float) -> Filter:
    """Keeps groups whose mean reward is from low to high, both included: neither too hard nor too easy."""
    if not low <= high:
        raise UserError(f"rollout.filter_range is {low:g} to {high:g}: write the lower bound first")

    def in_range(group: Group) -> str | None:
        mean = fmean([sample.reward for sample in group.scored] or [0.0])
        return None if low <= mean <= high else f"mean reward out of range: {mean:.3g} is not in {low:g} to {high:g}"

    return in_range


FILTERS: dict[str, Filter] = {"no_signal": no_signal, "none": keep_all}


def make_filter(name: str, low: float = 0.0, high: float = 1.0, root: str | os.PathLike[str] | None = None) -> Filter:
    """The filter of that name: one of `FILTERS`, `mean_range` with these bounds, or a user's function."""
    if name in FILTERS:
        return FILTERS[name]
    if name == "mean_range":
        return mean_range(low, high)
    return _users_filter(name, user_code("rollout.filter", name, [*FILTERS, "mean_range"], root))


def _users_filter(name: str, function: Callable[[Group], Any]) -> Filter:
    def judge(group: Group) -> str | None:
        try:
            verdict = function(group)
        except Exception as error:
            raise RunError(
                f"the filter {name!r} failed on group {group.index} of task {group.task.id!r}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if verdict is False:
            return f"filtered: by {name}"
        if verdict is None or verdict is True:
            return None
        if isinstance(verdict, str) and verdict:
            return verdict
        raise RunError(
            f"the filter {name!r} gave {verdict!r}: a filter gives the reason to drop a group or None to keep it, "
            "or True to keep it and False to drop it"
        )

    return judge


def user_code(setting: str, name: str, known: Iterable[str], root: str | os.PathLike[str] | None = None) -> Any:
    """The function or class a user names in a setting: `package.module:name` or `path/to/file.py:name`.

    Modules and relative files are looked for from `root`, by default the current folder. A file runs once in a process,
    whoever names it, and may import its neighbours.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        near = difflib.get_close_matches(name, list(known), n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise UserError(
            f"{setting}: there is no {name!r}{hint}: write {', '.join(known)}, `package.module:name` or "
            "`path/to/file.py:name`"
        )
    folder = Path(root) if root is not None and Path(root).is_dir() else Path.cwd()
    try:
        module = _file(folder / place) if place.endswith(".py") else _module(place, folder)
    except Exception as error:
        raise UserError(
            f"{setting}: {place!r} of {name!r} could not be imported: {type(error).__name__}: {error}"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(f"{setting}: there is no function or class {attribute!r} in {place}: it has {', '.join(names)}")
    return found


def _module(name: str, folder: Path) -> ModuleType:
    _join_path(folder)
    importlib.invalidate_caches()
    return importlib.import_module(name)


def _file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    name = f"roll_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    _join_path(path.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _join_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
