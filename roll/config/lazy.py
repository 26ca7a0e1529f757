"""Packages whose names are loaded when first used, so that importing one part of them does not pay for the others."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazily(package: str, names_by_module: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """A package's `__getattr__`. `names_by_module` says which module each of its names is in."""
    module_of = {name: module for module, names in names_by_module.items() for name in names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of[name]), name)

    return get
