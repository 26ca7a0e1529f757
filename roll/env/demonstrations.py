"""Demonstrations: episodes that an environment's expert plays, as conversations to imitate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from roll.config.errors import UserError
from roll.data.chat import Chat
from roll.data.sources import Split
from roll.data.task import EnvSpec, Message
from roll.env.episode import check_expert, turns


def demonstrations(
    split: Split,
    name: str,
    count: int = 1000,
    held_out: int = 100,
    first_seed: int = 0,
    max_turns: int = 100,
    **options: Any,
) -> Iterator[Chat]:
    """A chat source: the expert's episodes of an environment, one a seed. The seeds of both splits are those of the tasks
    that `environment` makes of the same options, so what is held out from a later run is not shown here either."""
    if count < 1 or held_out < 0 or max_turns < 1:
        raise UserError(
            f"data.options: count={count}, held_out={held_out}, max_turns={max_turns}: write a count and turns above 0, "
            "held_out not below"
        )
    check_expert(EnvSpec(name, first_seed, options))
    begin, size = (first_seed, count) if split == "train" else (first_seed + count, held_out)
    for seed in range(begin, begin + size):
        shown = demonstration(EnvSpec(name, seed, options), max_turns=max_turns)
        if shown is not None:
            yield Chat(f"{name}#{seed}", shown)


def demonstration(spec: EnvSpec, opening: tuple[Message, ...] = (), max_turns: int = 100) -> tuple[Message, ...] | None:
    """The expert's episode, to its last answer; None where it has no advice from the beginning."""
    said: tuple[Message, ...] | None = None
    for turn in turns(spec, lambda turn: turn.advice, opening, max_turns):
        if turn.advice is not None:
            said = turn.answered(turn.advice)
    return said
