"""From what the user wrote to a reward function: a built-in's name, `package.module:function` or `file.py:function`."""

from __future__ import annotations

import inspect
import os
import pickle
from dataclasses import dataclass
from typing import Any, cast

from roll.config.errors import UserError
from roll.config.user_code import load_user_code
from roll.reward.base import RewardFn
from roll.reward.builtin import BUILTINS, WARM_UPS


def resolve(name: str, root: str | os.PathLike[str] | None = None) -> RewardFn:
    """The reward function of that name: a built-in, or a user's, looked for from `root`. `UserError` if it is neither."""
    if name in BUILTINS:
        return BUILTINS[name]
    return _checked(name, load_user_code(name, what="reward", known=BUILTINS, root=root))


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
            raise UserError(
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


def _checked(name: str, function: Any) -> RewardFn:
    if not callable(function):
        raise UserError(f"reward {name!r} is a {type(function).__name__}, not a function (task, response) -> float")
    if inspect.iscoroutinefunction(function):
        raise UserError(f"reward {name!r} is an `async def`: a reward is a plain `def` (it runs in its own process)")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables written in C have none
        return cast(RewardFn, function)
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise UserError(f"reward {name!r} takes {signature}, but is called as (task, response): {error}") from error
    return cast(RewardFn, function)
