"""Episodes and demonstrations in small worlds, none of which is in both splits.

Different seeds can generate the same small world: of the lakes of 256 seeds, 215 are among those of 3000 others. The
world that a seed generates therefore decides whether it is held out, not the seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from zlib import crc32

from roll import Task
from roll.data.chat import Chat
from roll.data.sources import Split
from roll.data.task import EnvSpec
from roll.env.base import parse_reset
from roll.env.demonstrations import demonstration
from roll.env.resolve import resolve

HELD_OUT = 5
"""One world in this many is held out."""


def episodes(split: Split, name: str, count: int, held_out: int, first_seed: int = 0, **options: Any) -> Iterator[Task]:
    """Tasks in an environment."""
    for spec in _specs(split, name, count, held_out, first_seed, options):
        yield Task(f"{name}#{spec.seed}", (), domain=name, environment=spec)


def demonstrations(
    split: Split, name: str, count: int, held_out: int, first_seed: int = 0, **options: Any
) -> Iterator[Chat]:
    """Its expert's episodes."""
    for spec in _specs(split, name, count, held_out, first_seed, options):
        yield from demonstration(f"{name}#{spec.seed}", spec)


def _specs(
    split: Split, name: str, count: int, held_out: int, first_seed: int, options: dict[str, Any]
) -> Iterator[EnvSpec]:
    wanted, seed = (count if split == "train" else held_out), first_seed
    while wanted:
        text = parse_reset(resolve(name)(**options).reset(seed=seed)).messages[-1]["content"]
        world = text.rpartition("\n\n")[2]  # after the instructions, which depend on options
        if (crc32(world.encode()) % HELD_OUT == 0) == (split == "held_out"):
            yield EnvSpec(name, seed, options)
            wanted -= 1
        seed += 1
