"""Creates a reward from its name (a built-in, one of an installed package, `package.module:name` or `file.py:name`) and
options.

A user's name refers to a function, whose options are its arguments after `(task, response)`, or to a class, whose options
are the arguments of an instance that is called with `(task, response)`.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, cast

from roll.config.errors import UserError
from roll.config.option_types import check_types
from roll.config.secrets import KNOWN, resolved
from roll.config.suggest import did_you_mean
from roll.reward.base import RewardFn
from roll.reward.builtin import REWARDS


def make(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    root: str | os.PathLike[str] | None = None,
    where: str = "reward",
) -> RewardFn:
    """The reward of that name with these options; user code is searched from `root`. A `UserError` says what is wrong
    with the setting `where`."""
    KNOWN.learn(options := resolved(options or {}, f"{where}.options"))
    if name not in REWARDS.own:
        found = REWARDS.find(name, where, root)
        if not inspect.isclass(found):
            return _of_function(name, found, options, where)
        _bind(name, found, (), options, where)
        return callable_reward(name, _construct(found, options, where), where)
    factory = REWARDS.find(name, where)
    _bind(name, factory, (), options, where)
    return cast(RewardFn, _construct(factory, options, where))


def check_built_in(name: str, options: Mapping[str, Any], where: str = "reward") -> None:
    """Raises `UserError` if an option of a built-in has the wrong type, or names a token that is not set. Imports
    pydantic, which grader processes do without."""
    if name not in REWARDS.own:
        return
    check_types(REWARDS.find(name, where), options, f"{where}.options.")
    token = options.get("token_env")
    if token and not os.environ.get(token):
        raise UserError(
            f"{where}.options.token_env is {token!r}, but no such environment variable is set: `export {token}=…`, or "
            "leave token_env out"
        )


def callable_reward(name: str, function: Any, where: str = "reward") -> RewardFn:
    """The function, if it can be called as a reward."""
    if not callable(function):
        raise UserError(f"{where} {name!r} is a {type(function).__name__}, not a function (task, response) -> float")
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        raise UserError(f"{where} {name!r} is an `async def`: a reward is a plain `def` (it runs in its own process)")
    _bind(name, function, (None, None), {}, where)
    return cast(RewardFn, function)


def _of_function(name: str, function: Any, options: Mapping[str, Any], where: str) -> RewardFn:
    if not options or inspect.iscoroutinefunction(function):
        return callable_reward(name, function, where)
    _bind(name, function, (None, None), options, where)
    reward = functools.partial(function, **options)
    for attribute in ("deterministic", "warm_up", "answer_of", "check_answer"):
        if hasattr(function, attribute):
            setattr(reward, attribute, getattr(function, attribute))
    return cast(RewardFn, reward)


def _construct(factory: Callable[..., Any], options: Mapping[str, Any], where: str) -> Any:
    try:
        return factory(**options)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}.options: {error}") from error


def _bind(name: str, function: Any, arguments: tuple[Any, ...], options: Mapping[str, Any], where: str) -> None:
    """Raises `UserError` unless the function accepts these arguments and options."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables written in C have none
        return
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        known = [key for key, of in signature.parameters.items() if of.kind in named][len(arguments) :]
        unknown = next((option for option in options if option not in known), None)
        if unknown is not None:
            takes = f"; it takes: {', '.join(known)}" if known else "; it takes none"
            raise UserError(
                f"{where}.options.{unknown} is not an option of {name!r}{did_you_mean(unknown, known) or takes}"
            ) from error
        if not arguments:
            raise UserError(f"{where}.options: {name!r} is made with {signature}: {error}") from error
        raise UserError(f"{where} {name!r} takes {signature}, but is called as (task, response): {error}") from error
