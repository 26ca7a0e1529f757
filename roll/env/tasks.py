"""Tasks that are episodes of an environment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from roll.config.errors import UserError
from roll.data.sources import Split
from roll.data.task import EnvSpec, Task
from roll.env.preflight import episodes

COUNT, HELD_OUT = 1000, 100
"""Default numbers of training and held-out episodes, if the environment has that many."""
_SHARE = 10
"""With fewer episodes, one in this many is held out."""


def environment_tasks(
    split: Split,
    name: str,
    count: int | None = None,
    held_out: int | None = None,
    first_seed: int = 0,
    domain: str = "",
    root: str = "",
    **options: Any,
) -> Iterable[Task]:
    """A task source: the episodes of an environment, one per seed. The first `count` train, the next `held_out` are held
    out; the first seed is `first_seed`. The domain is the environment's name unless another is given. All other options
    are the environment's own. An environment with few episodes uses all of them by default."""
    spec = EnvSpec(name, first_seed, options, root=root)
    for seed in seeds(split, spec, count, held_out, "tasks"):
        yield Task(f"{name}#{seed}", (), domain=domain or name, environment=EnvSpec(name, seed, options, root=root))


def seeds(split: Split, first: EnvSpec, count: int | None, held_out: int | None, section: str) -> range:
    """The seeds of a split: the training seeds begin with that of `first`, the held-out seeds follow. Raises `UserError`
    if the environment cannot be created or has fewer; `section` is the config section that has the options."""
    for option, given in (("count", count), ("held_out", held_out), ("first_seed", first.seed)):
        if given is not None and (not isinstance(given, int) or isinstance(given, bool)):
            raise UserError(f"{section}.options: {option} is {given!r}: write a whole number")
    if (count is not None and count < 1) or (held_out is not None and held_out < 0):
        raise UserError(
            f"{section}.options: count={count}, held_out={held_out}: write a count above 0, held_out not below"
        )
    available = episodes(first)
    if available is not None and first.seed < 0:
        raise UserError(f"{section}.options: first_seed is {first.seed}: the seeds of {first.name!r} begin with 0")
    train, rest = _sizes(None if available is None else available - first.seed, count, held_out)
    if available is not None and (train < 1 or first.seed + train + rest > available):
        given_options = ", ".join(
            f"{option}={given}"
            for option, given in (("count", count), ("held_out", held_out), ("first_seed", first.seed or None))
            if given is not None
        )
        raise UserError(
            f"{section}.options: {first.name!r} has {available} episodes with its options, too few to train on some and "
            f"hold others out{f' with {given_options}' if given_options else ''}: write a smaller count or held_out, or "
            "give it more"
        )
    begin, size = (first.seed, train) if split == "train" else (first.seed + train, rest)
    return range(begin, begin + size)


def _sizes(available: int | None, count: int | None, held_out: int | None) -> tuple[int, int]:
    """The numbers of training and held-out episodes. Of 50 episodes they are 45 and 5, of 5000 they are 1000 and 100;
    given numbers are used even if there are too few episodes."""
    if available is None:
        return COUNT if count is None else count, HELD_OUT if held_out is None else held_out
    if held_out is None:
        held_out = min(HELD_OUT, max(1, available // _SHARE if count is None else available - count))
    return min(COUNT, available - held_out) if count is None else count, held_out
