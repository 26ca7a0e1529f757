"""Any `gymnasium` environment as a text environment.

    gymnasium:Taxi-v4          made by gymnasium.make("Taxi-v4"), observed by its text rendering
    gymnasium:CartPole-v1      has no text rendering; observed as numbers
    gymnasium:worlds:Maze-v0   gymnasium's syntax for one that the module `worlds` registers

In Python, `GymnasiumText` takes a name, an environment, or a function that creates one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from roll.config.errors import UserError
from roll.env.actions import ActingEnvironment, Action, Format, Invalid
from roll.env.base import Step
from roll.env.compat import check_takes_seed, plain_info, plain_text, user_function

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


class GymnasiumText(ActingEnvironment):
    """`make` are the environment's arguments. `actions` names the actions of a discrete space, in their order; without it
    they are numbers. `intro` is the first text.

    `show(observation, environment) -> str` is what the agent sees, instead of the environment's text rendering or,
    without one, its observation. `read(text, environment)` returns the action in a text, instead of the name or the
    numbers in it; the message of its `ValueError` is shown to the agent. Both may be given by name, `file.py:function`.
    """

    def __init__(
        self,
        environment: str | gymnasium.Env[Any, Any] | Callable[..., gymnasium.Env[Any, Any]],
        make: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        intro: str = "",
        show: Callable[[Any, Any], str] | str | None = None,
        read: Callable[[str, Any], Any] | str | None = None,
        format: Format = "answer",
        invalid_penalty: float = 0.0,
        turns: int = 0,
    ) -> None:
        super().__init__(format, invalid_penalty, turns)
        self._show, self._read = user_function(show, "show"), user_function(read, "read")
        self._world = _make_env(environment, dict(make or {}), as_text=self._show is None)
        self._space = self._world.action_space
        self._names = [name.lower() for name in actions]
        self._intro = intro
        self._observation: Any = None
        check_takes_seed("gymnasium", self._world)
        _check_actions(self._space, self._names, self._read is not None)

    def begin(self, seed: int) -> str:
        self._observation, _ = self._world.reset(seed=seed)
        return "\n\n".join(part for part in (self._intro, self._action_help(), self.view()) if part)

    def act(self, action: Action) -> Step | Invalid:
        try:
            chosen = self._read(action.text, self._world) if self._read is not None else self._parse_action(action.text)
        except ValueError as error:
            return Invalid(str(error))
        self._observation, reward, terminated, truncated, info = self._world.step(chosen)
        return Step(self.view(), float(reward), bool(terminated), bool(truncated), plain_info(info))

    def view(self) -> str:
        if self._show is not None:
            return str(self._show(self._observation, self._world))
        if self._world.render_mode == "ansi":
            return plain_text(str(self._world.render()))
        return observation_text(self._observation)

    def close(self) -> None:
        self._world.close()

    def _action_help(self) -> str:
        """One line of instructions about actions, if they are known."""
        if self._names:
            return f"Each turn, say one of {', '.join(self._names)}, like this: {self.format_action(self._names[0])}"
        if self._read is not None or isinstance(self._space, spaces.Text):
            return ""
        if isinstance(self._space, spaces.Discrete):
            first, last = self._space.start, self._space.start + self._space.n - 1
            return f"Each turn, say a number from {first} to {last}, like this: {self.format_action(str(first))}"
        example = ", ".join("0" for _ in range(int(np.prod(self._space.shape))))
        return f"Each turn, say the numbers of your action, like this: {self.format_action(example)}"

    def _parse_action(self, text: str) -> Any:
        """The action that a text names; the message of a `ValueError` is shown to the agent."""
        space = self._space
        if isinstance(space, spaces.Text):
            return self._check_contained(text, text)
        if self._names:
            if text.lower() not in self._names:
                raise ValueError(f"{text[:40]!r} is none of {', '.join(self._names)}.")
            return space.start + self._names.index(text.lower())
        numbers = [float(number) for number in _NUMBER.findall(text)]
        size = int(np.prod(space.shape))
        if len(numbers) != size:
            raise ValueError(f"{len(numbers)} numbers are in what you said, but an action has {size}.")
        if space.dtype is not None and np.issubdtype(space.dtype, np.integer) and any(n % 1 for n in numbers):
            raise ValueError(f"{text[:40]!r} is no action: write whole numbers.")
        with np.errstate(all="ignore"):  # values that overflow are rejected by `contains`
            chosen = np.array(numbers).astype(space.dtype).reshape(space.shape)
        return self._check_contained(text, chosen if space.shape else chosen[()])

    def _check_contained(self, text: str, action: Any) -> Any:
        if not self._space.contains(action):
            raise ValueError(f"{text[:40]!r} is outside of what an action may be: {self._space}.")
        return action


def factory_of(name: str) -> Callable[..., GymnasiumText]:
    """The factory of the environment that gymnasium knows by that name."""
    try:
        gymnasium.spec(name)
    except Exception as error:
        raise UserError(f"environment 'gymnasium:{name}': {error}") from error
    return partial(GymnasiumText, name)


def observation_text(observation: Any) -> str:
    """An observation as text: texts unchanged, parts by name, numbers with four digits."""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping):
        return "\n".join(f"{name}: {observation_text(part)}" for name, part in observation.items())
    if isinstance(observation, tuple | list):
        return "\n".join(observation_text(part) for part in observation)
    array = np.asarray(observation)
    if array.ndim > 1:
        return "\n".join(observation_text(row) for row in array)
    return " ".join(f"{number:.4g}" for number in np.atleast_1d(array).tolist())


def _make_env(environment: Any, make: dict[str, Any], as_text: bool) -> gymnasium.Env[Any, Any]:
    if isinstance(environment, gymnasium.Env):
        return environment
    if not isinstance(environment, str):
        return environment(**make)
    modes = _render_modes(environment)
    if as_text and "ansi" in modes:
        make.setdefault("render_mode", "ansi")
    return gymnasium.make(environment, **make)


def _render_modes(name: str) -> Sequence[str]:
    point = gymnasium.spec(name).entry_point
    creator = gymnasium.envs.registration.load_env_creator(point) if isinstance(point, str) else point
    modes: Sequence[str] = getattr(creator, "metadata", {}).get("render_modes", ())
    return modes


def _check_actions(space: Any, names: list[str], has_reader: bool) -> None:
    if names and (not isinstance(space, spaces.Discrete) or len(names) != space.n):
        raise ValueError(f"gymnasium: actions names {len(names)} actions, but the environment's are {space}")
    takes = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box, spaces.Text)
    if not has_reader and not isinstance(space, takes):
        raise ValueError(f"gymnasium: actions of {space} cannot be read from text: write read=FUNCTION")
