"""Adapters for what other libraries' environments return."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from roll.config.errors import UserError
from roll.config.user_code import load_user_code
from roll.data.finite import metric_of

_COLOURED = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0m", re.DOTALL)
_CODES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def plain_info(info: Mapping[Any, Any]) -> dict[str, float | str]:
    """The texts and finite numbers of an info; arrays, lists and everything else are dropped."""
    plain: dict[str, float | str] = {}
    for key, value in info.items():
        if isinstance(value, str):
            plain[str(key)] = value
        elif getattr(value, "ndim", 0) == 0 and hasattr(value, "__float__"):
            with contextlib.suppress(ValueError):
                plain[str(key)] = metric_of(value, "")
    return plain


def plain_text(text: str) -> str:
    """Terminal output as plain text: coloured parts are put in brackets."""
    return _CODES.sub("", _COLOURED.sub(r"[\1]", text)).strip("\n")


def user_function(given: Callable[..., Any] | str | None, what: str) -> Callable[..., Any] | None:
    """A function, or the one that a text names: `module:name` or `file.py:name`."""
    return load_user_code(given, what=what) if isinstance(given, str) else given


def check_takes_seed(name: str, environment: Any) -> None:
    """Raises `UserError` if another library's environment cannot be reset with a seed."""
    try:
        inspect.signature(environment.reset).bind(seed=0)
    except TypeError as error:
        raise UserError(
            f"{name}: {type(environment).__name__}.reset takes no seed, so that no episode could be played again: {error}"
        ) from error
