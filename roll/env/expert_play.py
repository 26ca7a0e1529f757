"""Plays an episode in this process, with the expert's advice at every turn.

An environment with an expert has a method `expert() -> str | None`: the expert's next action in the environment's own
format, or None if it has no advice.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from roll.config.errors import UserError
from roll.data.task import EnvSpec, Message
from roll.env.base import parse_reset, parse_step, tools_of
from roll.env.preflight import check
from roll.env.resolve import resolve, resolve_options


@dataclass(frozen=True)
class ExpertTurn:
    """A turn of an episode: the conversation that the agent sees, and the expert's advice."""

    messages: tuple[Message, ...]
    """The conversation so far, as the agent sees it; the last message is the environment's."""
    advice: str | None
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def with_advice(self) -> tuple[Message, ...]:
        """The conversation with the expert's answer appended."""
        assert self.advice is not None, "the expert has no advice"
        return (*self.messages, Message(role="assistant", content=self.advice))


ActionPolicy: TypeAlias = Callable[[ExpertTurn], str | None]
"""Chooses the action of a turn; None ends the episode."""


def check_expert(spec: EnvSpec) -> None:
    """Raises `UserError` if the spec's environment cannot be created or has no expert."""
    check(spec)
    factory = resolve(spec.name, spec.root)
    if inspect.isclass(factory) and not callable(getattr(factory, "expert", None)):
        raise _without_expert(spec)


def turns(
    spec: EnvSpec, policy: ActionPolicy, opening: tuple[Message, ...] = (), max_turns: int = 100, window: int = 0
) -> Iterator[ExpertTurn]:
    """The turns of an episode in which `policy` acts: until its end, until a turn without an action, or for `max_turns`
    turns. `opening` precedes the environment's first messages; with a `window`, the agent sees the first messages and
    only the last `window` turns."""
    environment = resolve(spec.name, spec.root)(**resolve_options(spec.name, spec.options, spec.root))
    expert = getattr(environment, "expert", None)
    if not callable(expert):
        raise _without_expert(spec)
    try:
        first = parse_reset(_require_sync(spec, environment.reset(seed=spec.seed)), tools_of(environment))
        opening_messages = (*opening, *first.messages)
        past: list[tuple[Message, ...]] = []
        for _ in range(max_turns):
            recent = (message for before in past[-window:] for message in before)
            turn = ExpertTurn((*opening_messages, *recent), _require_sync(spec, expert()), first.tools)
            yield turn
            action = policy(turn)
            if action is None:
                return
            step = parse_step(_require_sync(spec, environment.step(action)))
            if step.done:
                return
            past.append((Message(role="assistant", content=action), *step.messages))
    finally:
        close = getattr(environment, "close", None)
        if close is not None:
            _require_sync(spec, close())


def _require_sync(spec: EnvSpec, result: Any) -> Any:
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise UserError(f"environment {spec.name!r} is async, but its expert is called where nothing can be awaited")
    return result


def _without_expert(spec: EnvSpec) -> UserError:
    return UserError(
        f"environment {spec.name!r} has no expert: give it a method `expert()` that returns what to say now, or None"
    )
