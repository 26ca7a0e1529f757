"""A chat: a conversation whose assistant messages are trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from roll.data.task import Message, Task
from roll.data.tokenlog import TokenLog


@dataclass(frozen=True)
class Chat:
    """Messages, or tokens. Its id is unique in its source and stable across runs."""

    id: str
    messages: tuple[Message, ...] = ()
    log: TokenLog | None = None
    """The conversation as tokens, if given: then nothing is rendered. Its responses are trained on."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Functions that the assistant may call, as JSON schemas."""
    learn: Literal["all", "last"] = "all"
    """Which assistant messages are trained on: all, or the last message of the conversation."""

    def __post_init__(self) -> None:
        if self.log is None:
            _check_messages(self.messages)
            if self.learn == "last" and self.messages[-1]["role"] != "assistant":
                raise ValueError("its last message is to be imitated, but is not the assistant's")
        elif self.messages:
            raise ValueError("it has messages and tokens: give one of them")
        elif not self.log.response_tokens:
            raise ValueError("no token of it is a response")

    @classmethod
    def of(cls, id: str, *texts: str) -> Chat:
        """A chat in which user and assistant alternate."""
        roles = ("user", "assistant")
        return cls(id, tuple(Message(role=roles[i % 2], content=text) for i, text in enumerate(texts)))

    @classmethod
    def of_task(cls, task: Task) -> Chat:
        """A task and its answer."""
        if task.environment is not None or task.answer is None:
            raise ValueError("the task has no answer to imitate")
        # the first of several
        answer = task.answer[0] if isinstance(task.answer, list | tuple) and task.answer else task.answer
        if not isinstance(answer, str | int | float):
            raise ValueError(f"the task's answer is a {type(answer).__name__}, not a text that can be imitated")
        return cls(task.id, (*task.messages, Message(role="assistant", content=str(answer))))


def _check_messages(messages: Sequence[Message]) -> None:
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise ValueError(f"{message!r:.100} is no message: write a role and a content")
        if not isinstance(message["role"], str) or not isinstance(message["content"], str):
            raise ValueError(f"role and content of a message are text, not {message!r:.100}")
    from_assistant = [message["role"] == "assistant" for message in messages]
    if not any(from_assistant):
        raise ValueError("no message in it is the assistant's: there is nothing to imitate")
    if from_assistant[0]:
        raise ValueError("its first message is the assistant's, who needs something to answer")
