"""Environments with GEM's interface, which already use text: `reset(seed) -> (observation, info)` and
`step(action) -> (observation, reward, terminated, truncated, info)`.

    gem:game:GuessTheNumber-v0      made by gem.make("game:GuessTheNumber-v0"), of the package gem-llm

In Python, `GemEnvironment` takes a name, an environment, or a function that creates one; the package is not needed then.

Such environments use Python's and NumPy's global random generators, which all environments of a process share. So each
has its own states of these generators, which are installed while it is called, and only one is called at a time: its
episodes depend on their seeds alone, whatever other environments do.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from roll.config.errors import UserError
from roll.env.base import Environment, Step
from roll.env.compat import check_takes_seed, plain_info

_SUFFIX = "suffix"
"""The info key under which some of them put text for the agent to read after the observation."""
_CALL_LOCK = threading.Lock()


class GemEnvironment(Environment):
    """`make` are the environment's arguments. It parses actions and reports invalid ones itself."""

    def __init__(self, environment: Any, make: Mapping[str, Any] | None = None) -> None:
        if isinstance(environment, str):
            environment = partial(_gem().make, environment)
        is_instance = hasattr(environment, "step") and not isinstance(environment, type)
        self._world = environment if is_instance else environment(**(make or {}))
        check_takes_seed("gem", self._world)
        self._rng_states: Any = None

    def reset(self, seed: int) -> tuple[str, dict[str, float | str]]:
        with self._own_rng_states():
            observation, info = self._world.reset(seed=seed)
        return _observation_text(observation, info), plain_info(info)

    def step(self, action: str) -> Step:
        with self._own_rng_states():
            observation, reward, terminated, truncated, info = self._world.step(action)
        return Step(
            _observation_text(observation, info), float(reward), bool(terminated), bool(truncated), plain_info(info)
        )

    def close(self) -> None:
        close = getattr(self._world, "close", None)
        if close is not None:
            close()

    @contextmanager
    def _own_rng_states(self) -> Iterator[None]:
        # waits: for a call, which has a deadline
        with _CALL_LOCK:
            process_states = _generators()
            if self._rng_states is not None:
                _set_generators(self._rng_states)
            try:
                yield
            finally:
                self._rng_states = _generators()
                _set_generators(process_states)


def factory_of(name: str) -> Callable[..., GemEnvironment]:
    """The factory of the environment that the package gem-llm knows by that name."""
    _gem()
    return partial(GemEnvironment, name)


def _generators() -> Any:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _set_generators(states: Any) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])


def _gem() -> Any:
    try:
        import gem
    except ModuleNotFoundError as error:
        raise UserError(f"environments `gem:…` need the package gem-llm ({error}): run `pip install gem-llm`") from error
    return gem


def _observation_text(observation: object, info: Mapping[str, Any]) -> str:
    suffix = info.get(_SUFFIX)
    return f"{observation}\n{suffix}" if isinstance(suffix, str) and suffix else str(observation)
