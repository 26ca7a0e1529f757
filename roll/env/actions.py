"""Action formats: how an agent's text contains its action, and environments that use them.

    <think>the goal is below me</think> <answer>down</answer>                         format `answer`: `down`
    {"name": "move", "arguments": {"action": "down"}}                                 format `json`: `down`
    I'd go down.                                        format `free`: what the environment reads there, `down`

If the text has several actions, the last one counts. `parse` reads what `write` writes. An `Invalid` tells the agent in
one sentence what is wrong.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from roll.env.base import STATE, Environment, Step

Format: TypeAlias = Literal["answer", "json", "free"]
FORMATS: tuple[Format, ...] = get_args(Format)

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_JSON_CHARS = 32_768
"""Characters at the end of the text that are searched for a tool call."""


@dataclass(frozen=True)
class Tool:
    """The tool that an action calls in the format `json`: its name, and the argument that is the action."""

    name: str = "act"
    argument: str = "action"
    does: str = "Do something in the world."

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema that chat templates show to a model."""
        argument = {self.argument: {"type": "string"}}
        parameters = {"type": "object", "properties": argument, "required": [self.argument]}
        return {"type": "function", "function": {"name": self.name, "description": self.does, "parameters": parameters}}


ACT = Tool()


@dataclass(frozen=True)
class Action:
    """The agent's action as text, without the format's markup. A tool call also has all its arguments."""

    text: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Invalid:
    """The text has no valid action, and why."""

    reason: str


Parser: TypeAlias = Callable[[str], "str | Invalid"]
"""Finds the action in free text."""


def parse(text: str, format: Format, *, tool: Tool = ACT, parser: Parser | None = None) -> Action | Invalid:
    """The action in the text. In the format `free` the `parser` finds it; without a parser it is the whole text."""
    if format == "answer":
        return _parse_answer(text)
    if format == "json":
        return _parse_call(text, tool)
    found = parser(text) if parser is not None else text.strip()
    if isinstance(found, Invalid):
        return found
    return Action(found) if found else Invalid("You said nothing.")


def write(action: str, format: Format, *, tool: Tool = ACT) -> str:
    """The action in the format's markup, as an agent would write it."""
    if format == "answer":
        return f"<answer>{action}</answer>"
    if format == "json":
        return json.dumps({"name": tool.name, "arguments": {tool.argument: action}}, ensure_ascii=False)
    return action


def check_format(name: str, format: str) -> None:
    """Raises `ValueError` for an unknown format."""
    if format not in FORMATS:
        raise ValueError(f"{name}: format is {format!r}: write {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")


class ActingEnvironment(Environment):
    """An environment whose actions are written in a `format`.

    A subclass implements `begin`, which starts the episode, `act`, which executes an action or returns an `Invalid`, and
    `view`, the agent's current observation; observations are texts. An invalid action changes nothing: the agent gets the
    reason and the view again, and pays `invalid_penalty`. Every step's info has `invalid`, the number of invalid actions
    so far. After `turns` actions of either kind the episode is truncated (0: never).
    """

    tool: ClassVar[Tool] = ACT

    def __init__(self, format: Format = "answer", invalid_penalty: float = 0.0, turns: int = 0) -> None:
        name = type(self).__name__
        check_format(name, format)
        if turns < 0:
            raise ValueError(f"{name}: turns is {turns}: write 0 for no limit, or a number above")
        self._format: Format = format
        self._invalid_penalty = invalid_penalty
        self._turns = turns
        self._turn = 0
        self._invalid = 0

    @abstractmethod
    def begin(self, seed: int) -> str:
        """Starts the episode of that seed; returns the instructions and the first view."""

    @abstractmethod
    def act(self, action: Action) -> Step | Invalid:
        """Executes the action, or says why it is invalid."""

    @abstractmethod
    def view(self) -> str:
        """The agent's current observation."""

    def state(self) -> str | float | None:
        """The name of the current state; None if the view shows all of it."""
        return None

    @property
    def episodes(self) -> int | None:
        """The number of episodes, for seeds from 0 on; None if every seed has one."""
        return None

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tool that actions call, in the format `json`."""
        return [self.tool.schema] if self._format == "json" else []

    def extra_info(self) -> dict[str, float | str]:
        """Further entries for the info of every step."""
        return {}

    def read(self, text: str) -> str | Invalid:
        """The action in free text: all of it, unless a subclass overrides this."""
        return text.strip() or Invalid("You said nothing.")

    def format_action(self, action: str) -> str:
        """An action in this environment's format, for examples and for the expert."""
        return write(action, self._format, tool=self.tool)

    def reset(self, seed: int) -> tuple[str, dict[str, float | str]]:
        self._turn = self._invalid = 0
        opening = self.begin(seed)
        return opening, self._state_info()

    def step(self, action: str) -> Step:
        self._turn += 1
        step = self._apply(action)
        if isinstance(step, Invalid):
            self._invalid += 1
            step = Step(f"Invalid action: {step.reason}\n\n{self.view()}", 0.0 - self._invalid_penalty)
        is_last = self._turn == self._turns and not step.done
        if is_last:
            step = replace(step, observation=f"{step.observation}\n\nYou have no turns left.", truncated=True)
        state_info = {} if step.done else self._state_info()
        return replace(step, info={"invalid": float(self._invalid), **self.extra_info(), **state_info, **step.info})

    def _apply(self, text: str) -> Step | Invalid:
        parsed = parse(text, self._format, tool=self.tool, parser=self.read)
        return parsed if isinstance(parsed, Invalid) else self.act(parsed)

    def _state_info(self) -> dict[str, float | str]:
        state = self.state()
        return {} if state is None else {STATE: state}


def _parse_answer(text: str) -> Action | Invalid:
    found = _ANSWER.findall(text)
    if not found:
        return Invalid("there is no <answer>…</answer> in what you said.")
    return Action(found[-1].strip()) if found[-1].strip() else Invalid("there is nothing between <answer> and </answer>.")


def _parse_call(text: str, tool: Tool) -> Action | Invalid:
    call = _last_call(text[-_JSON_CHARS:])
    if call is None:
        example = write("…", "json", tool=tool)
        return Invalid(f"there is no tool call in what you said. Write one as JSON: {example}")
    name, arguments = call
    # half of a surrogate pair becomes a `?`
    arguments = json.loads(json.dumps(arguments, ensure_ascii=False).encode(errors="replace"))
    if name != tool.name:
        return Invalid(f"there is no tool {name!r:.40}: the tool is {tool.name!r}.")
    if tool.argument not in arguments:
        return Invalid(f"the tool {tool.name!r} needs the argument {tool.argument!r}.")
    action = arguments[tool.argument]
    return Action(action.strip() if isinstance(action, str) else json.dumps(action), arguments)


def _last_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments of the last outermost JSON object that is a tool call."""
    found: tuple[str, dict[str, Any]] | None = None
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except RecursionError:  # no tool call is that deep, and trying every level would take long
            return found
        except ValueError:
            end = at + 1
        else:
            found = _as_call(value) or found
        at = text.find("{", end)
    return found


def _as_call(value: Any) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments of a tool call. Models write calls in several ways: the arguments may be called parameters or be
    JSON in a string, and the call may be the `function` of an object."""
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return (name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None
