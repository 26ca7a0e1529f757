"""Checks before a run starts whether an environment can be created.

ROLL's own environments and gymnasium's are created with their options. Others may be expensive to create, or have side
effects: only the names of their options are checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll.config.errors import UserError
from roll.config.option_types import check_types
from roll.env.resolve import BUILT_IN, EnvSpecError, Factory, check_options, resolve, resolve_options

if TYPE_CHECKING:
    from roll.data.task import EnvSpec

_GYMNASIUM = "gymnasium:"


def check(spec: EnvSpec) -> None:
    """Raises `UserError` unless the spec's environment exists, accepts its options and has an episode for the seed."""
    check_seed(spec, episodes(spec))


def check_seed(spec: EnvSpec, count: int | None) -> None:
    """Raises `EnvSpecError` if the environment has at most `count` episodes and the seed is not among them."""
    if count is not None and not 0 <= spec.seed < count:
        raise EnvSpecError(f"environment {spec.name!r}: the seed is {spec.seed}, but its episodes are 0 to {count - 1}")


def episodes(spec: EnvSpec) -> int | None:
    """The number of episodes of the spec's environment with its options, for seeds from 0 on; None if every seed has one,
    or the number is unknown. Raises `UserError` if the environment does not exist or cannot be created."""
    factory = resolve(spec.name, spec.root)
    check_options(spec.name, factory, spec.options)
    if not checks_values(spec.name):
        return None
    check_types(_unwrap(factory), spec.options, f"environment {spec.name!r}: ")
    return None if _is_foreign(spec.name) else _episode_count(spec, factory)


def checks_values(name: str) -> bool:
    """Whether the values of its options are checked, and not only their names."""
    return name in BUILT_IN or name.startswith(_GYMNASIUM)


def _episode_count(spec: EnvSpec, factory: Factory) -> int | None:
    name = spec.name
    try:
        environment = factory(**resolve_options(name, spec.options, spec.root))
    except (UserError, ValueError) as error:
        message = str(error).removeprefix(f"{name}: ").removeprefix(f"{_unwrap(factory).__name__}: ")
        raise EnvSpecError(f"environment {name!r}: {message}") from error
    except Exception as error:
        raise EnvSpecError(f"environment {name!r}: making one raised {type(error).__name__}: {error}") from error
    count: int | None = getattr(environment, "episodes", None)
    environment.close()
    return count


def _unwrap(factory: Factory) -> Factory:
    """The class whose signature to check: for a library's environment, the wrapper around it."""
    wrapped: Factory = getattr(factory, "func", factory)
    return wrapped


def _is_foreign(name: str) -> bool:
    """Whether gymnasium only registers it, and its code is another package's."""
    if name in BUILT_IN:
        return False
    import gymnasium

    return not str(gymnasium.spec(name.removeprefix(_GYMNASIUM)).entry_point).startswith("gymnasium.")
