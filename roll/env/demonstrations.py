"""Demonstrations: episodes played by an environment's expert, as conversations for SFT."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from roll.config.errors import UserError
from roll.data.chat import Chat
from roll.data.sources import Split
from roll.data.task import EnvSpec, Message
from roll.env.expert_play import check_expert, turns
from roll.env.tasks import seeds


def demonstrations(
    split: Split,
    name: str,
    count: int | None = None,
    held_out: int | None = None,
    first_seed: int = 0,
    max_turns: int = 100,
    window: int = 0,
    root: str = "",
    **options: Any,
) -> Iterator[Chat]:
    """A chat source: the expert's episodes of an environment, one per seed. Both splits have the same seeds as the tasks
    that `environment` makes from the same options, so tasks held out in a later run are not shown here either. `window`
    is for runs with `env.window`: each answer then follows only what the agent sees in such a run."""
    if max_turns < 1 or window < 0:
        raise UserError(f"data.options: max_turns={max_turns}, window={window}: write turns above 0, a window not below")
    spec = EnvSpec(name, first_seed, options, root=root)
    check_expert(spec)
    for seed in seeds(split, spec, count, held_out, "data"):
        yield from demonstration(
            f"{name}#{seed}", EnvSpec(name, seed, options, root=root), max_turns=max_turns, window=window
        )


def demonstration(
    id: str, spec: EnvSpec, opening: tuple[Message, ...] = (), max_turns: int = 100, window: int = 0
) -> Iterator[Chat]:
    """The expert's episode, up to its last answer: one chat or, with a window, one per answer; none if the expert has no
    advice at the start."""
    episode = turns(spec, lambda turn: turn.advice, opening, max_turns, window)
    advised = [turn for turn in episode if turn.advice is not None]
    chats = [Chat(f"{id}/{number}", turn.with_advice, tools=turn.tools) for number, turn in enumerate(advised)]
    if window:
        yield from (replace(chat, learn="last") for chat in chats)
    elif chats:
        yield replace(chats[-1], id=id)
