"""A task: one thing to solve, and what its verifier needs to judge an attempt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict


class Message(TypedDict):
    """One turn of a conversation, as chat templates expect it."""

    role: str
    content: str


@dataclass(frozen=True)
class EnvSpec:
    """An environment and the episode to play in it: the same spec gives the same episode everywhere."""

    name: str
    """A registered name, `package.module:Class` or `path/to/file.py:Class`."""
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the environment's constructor."""
    code: str | bytes = ""
    """For a registered name, the path of its class, or the pickled class: for processes that did not register it."""
    root: str = field(default="", compare=False)
    """The folder from which this process resolves a relative name; environment processes have their own."""


@dataclass(frozen=True)
class Task:
    """One thing to solve. Its id is unique in its source and stable across runs."""

    id: str
    messages: tuple[Message, ...]
    answer: Any = None
    domain: str = "default"
    info: Mapping[str, Any] = field(default_factory=dict)
    environment: EnvSpec | None = None
    """The environment of a multi-turn attempt; None for a single response to the messages."""

    @classmethod
    def ask(cls, id: str, question: str, answer: Any = None, *, domain: str = "default", **info: Any) -> Task:
        """A task of one user message."""
        return cls(id, ({"role": "user", "content": question},), answer, domain, info)

    @property
    def question(self) -> str:
        """The last user message."""
        return next((m["content"] for m in reversed(self.messages) if m["role"] == "user"), "")


@dataclass(frozen=True)
class Response:
    """What a grader sees of an attempt: the text after the prompt, and how it ended."""

    text: str
    tokens: int
    finish: str
    """`stop` (the model ended it, or a stop string did), `length` (the token limit did) or `abort`."""
