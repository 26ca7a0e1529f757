"""Registries: everything that a setting can name. A name is one of ROLL's own, one that an installed package offers as an
entry point, or the user's code (`package.module:name` or `path/to/file.py:name`).

Importing this module loads little, and a registry imports only the code of the name that is asked for.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roll.config.errors import UserError
from roll.config.suggest import did_you_mean, either
from roll.config.user_code import FORMS, load_user_code


def offered(group: str) -> dict[str, str]:
    """What installed packages offer under the entry-point group: paths of code, by name."""
    from importlib.metadata import entry_points  # not above: it takes a while, and only unknown short names need it

    return {point.name: point.value for point in entry_points(group=group)}


@dataclass(frozen=True)
class Registry:
    """The code that one kind of setting can name."""

    noun: str
    """What is named, for messages: `strategy`."""
    group: str
    """The group of entry points: `roll.train_strategies`."""
    own: Mapping[str, str]
    """ROLL's own, `module:name` by name."""

    def check(self, name: str, setting: str) -> None:
        """Raises `UserError` for a name that is neither known nor of the form of user code. Imports no code."""
        if name in self.own or ":" in name or name in (packages := offered(self.group)):
            return
        known = [*self.own, *packages]
        raise UserError(f"{setting} {name!r} is not known: write {either([*known, *FORMS])}{did_you_mean(name, known)}")

    def find(self, name: str, setting: str, root: str | os.PathLike[str] | None = None) -> Any:
        """The code of that name; `UserError` if there is none. User code is looked for from `root`."""
        if name in self.own:
            module, _, attribute = self.own[name].partition(":")
            return getattr(importlib.import_module(module), attribute)
        if ":" in name:
            return load_user_code(name, what=setting, root=root)
        self.check(name, setting)
        what = f"{setting}: the {self.noun} {name!r} of an installed package, at"
        return load_user_code(offered(self.group)[name], what=what, root=root)
