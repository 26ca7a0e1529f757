"""Tasks that take place in an environment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from roll.config.errors import UserError
from roll.data.sources import Split
from roll.data.task import EnvSpec, Task
from roll.env.resolve import check


def environment_tasks(
    split: Split,
    name: str,
    count: int = 1000,
    held_out: int = 100,
    first_seed: int = 0,
    domain: str = "",
    **options: Any,
) -> Iterable[Task]:
    """A task source: the episodes of an environment, one a seed. `count` of them train, the next `held_out` are held out;
    the first seed is `first_seed`. The domain is the environment's name unless another is given. All other options are
    the environment's own."""
    if count < 1 or held_out < 0:
        raise UserError(f"tasks.options: count={count}, held_out={held_out}: write a count above 0, held_out not below")
    check(EnvSpec(name, first_seed, options))
    begin, size = (first_seed, count) if split == "train" else (first_seed + count, held_out)
    for seed in range(begin, begin + size):
        yield Task(f"{name}#{seed}", (), domain=domain or name, environment=EnvSpec(name, seed, options))
