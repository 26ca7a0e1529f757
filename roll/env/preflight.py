"""Whether an environment can be made, found out before a run starts.

One of ROLL's own, or of gymnasium's, is made with the options, to see. Others may be costly, or do something when they
are made: of them only the names of the options are looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll.config.errors import UserError
from roll.config.option_types import check_types
from roll.env.resolve import BUILT_IN, EnvSpecError, Factory, check_options, resolve, with_files

if TYPE_CHECKING:
    from roll.data.task import EnvSpec

_GYMNASIUM = "gymnasium:"


def check(spec: EnvSpec) -> None:
    """Holds that the spec's environment is there, takes its options and has its episode: `UserError` if not."""
    check_seed(spec, episodes(spec))


def check_seed(spec: EnvSpec, most: int | None) -> None:
    """`EnvSpecError` if the spec's environment, which has at most so many episodes, has not this one."""
    if most is not None and not 0 <= spec.seed < most:
        raise EnvSpecError(f"environment {spec.name!r}: the seed is {spec.seed}, but its episodes are 0 to {most - 1}")


def episodes(spec: EnvSpec) -> int | None:
    """How many episodes the spec's environment has at most with its options, of the seeds from 0 on; None where every
    seed makes one, or that is not known. `UserError` if it is not there or cannot be made so."""
    factory = resolve(spec.name, spec.root)
    check_options(spec.name, factory, spec.options)
    if not minds_values(spec.name):
        return None
    check_types(_called(factory), spec.options, f"environment {spec.name!r}: ")
    return None if _is_foreign(spec.name) else _made(spec, factory)


def minds_values(name: str) -> bool:
    """Whether not only the names of its options are looked at, but what they are."""
    return name in BUILT_IN or name.startswith(_GYMNASIUM)


def _made(spec: EnvSpec, factory: Factory) -> int | None:
    name = spec.name
    try:
        environment = factory(**with_files(name, spec.options, spec.root))
    except (UserError, ValueError) as error:
        said = str(error).removeprefix(f"{name}: ").removeprefix(f"{_called(factory).__name__}: ")
        raise EnvSpecError(f"environment {name!r}: {said}") from error
    except Exception as error:
        raise EnvSpecError(f"environment {name!r}: making one raised {type(error).__name__}: {error}") from error
    most: int | None = getattr(environment, "episodes", None)
    environment.close()
    return most


def _called(factory: Factory) -> Factory:
    """The class: of a library's environment, that which is called with its name."""
    called: Factory = getattr(factory, "func", factory)
    return called


def _is_foreign(name: str) -> bool:
    """Whether gymnasium only knows of it, and its code is another's."""
    if name in BUILT_IN:
        return False
    import gymnasium

    return not str(gymnasium.spec(name.removeprefix(_GYMNASIUM)).entry_point).startswith("gymnasium.")
