"""The environment interface: what its methods may return, and how a call fails.

Every environment process imports this module, so it imports little: the type of messages is imported for type checkers
only.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat, TypeAlias

from roll.data.finite import describe, hint, metric_of, reward_of, short_repr

if TYPE_CHECKING:
    from roll.data.task import Message

Observation: TypeAlias = "str | Sequence[Message]"
"""What the agent sees next: text (a user message), or messages."""

FailureKind: TypeAlias = Literal["raised", "deadline", "crashed", "invalid", "lost"]
"""`raised`: the environment raised an exception. `deadline`: it took too long. `crashed`: it ended its process.
`invalid`: the environment, or what it returned, breaks the interface. `lost`: the episode ended through no fault of its
own and may be started again."""


STATE = "state"
"""The key, in the info of `reset` and `step`, of the state that the environment reached: any text or number, equal for
equal states. Environments that name their states say which turns of a task's episodes can be compared."""


class EnvFailure(Exception):
    """A call of an environment failed, and the episode is over. `reason` is one line; `detail` is the environment's
    traceback, if it raised; `candidates` is the number of in-flight calls of which one crashed the process."""

    def __init__(self, kind: FailureKind, reason: str, detail: str = "", candidates: int = 1) -> None:
        super().__init__(kind, reason, detail, candidates)
        self.kind: FailureKind = kind
        self.reason = reason
        self.detail = detail
        self.candidates = candidates

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"


@dataclass(frozen=True)
class ResetResult:
    """The beginning of an episode: the first messages for the agent."""

    messages: tuple[Message, ...]
    info: dict[str, float | str] = field(default_factory=dict)
    tools: tuple[dict[str, Any], ...] = ()
    """Functions that the agent may call, as JSON schemas; chat templates with tool support show them."""


@dataclass(frozen=True)
class Step:
    """The result of an action. `terminated`: the task is over; `truncated`: it was cut off by a limit that is not part of
    the task. A step from an environment process has a finite reward, and a text or a tuple of messages."""

    observation: Observation
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, float | str] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Whether this was the episode's last step."""
        return self.terminated or self.truncated

    @property
    def messages(self) -> tuple[Message, ...]:
        """The observation as messages: a text becomes a user message."""
        return as_messages(self.observation)


ResetReturn: TypeAlias = "Observation | tuple[Observation, Mapping[str, Any]]"
"""What `reset` may return: an observation, or an observation and info."""

StepReturn: TypeAlias = "Step | tuple[Observation, SupportsFloat, bool, bool, Mapping[str, Any]]"
"""What `step` may return: a `Step`, or `(observation, reward, terminated, truncated, info)`."""


class Environment(ABC):
    """The environment of one episode, created for each: `reset` is called once and first, then `step` until the last one,
    then `close`.

    All randomness of an episode must come from the seed, so that it can be reproduced anywhere. Methods may be `async
    def`. Plain methods run in the episode's own thread, the same for all its calls; async methods share an event loop
    with the other environments of the process, which a blocking call would delay. A class need not inherit from this one;
    only its methods matter.

    An attribute `tools`, or a method that returns them after `reset`, lists the functions that the agent may call, as
    JSON schemas, for chat templates that show them; the agent's calls still arrive as text.
    """

    @abstractmethod
    def reset(self, seed: int) -> ResetReturn | Awaitable[ResetReturn]:
        """Begins the episode of that seed."""

    @abstractmethod
    def step(self, action: str) -> StepReturn | Awaitable[StepReturn]:
        """Executes the agent's action."""

    def close(self) -> Awaitable[None] | None:
        """Releases the environment's resources. Also called after a failure, but not if its process dies."""
        return None


def as_messages(observation: Observation) -> tuple[Message, ...]:
    """An observation as messages: a text becomes a user message."""
    return ({"role": "user", "content": observation},) if isinstance(observation, str) else tuple(observation)


def parse_reset(result: Any, tools: Any = ()) -> ResetResult:
    """Validates the result of `reset` and the environment's tools; `ValueError` says what is wrong."""
    info: object = {}
    if isinstance(result, tuple) and len(result) == 2 and not isinstance(result[0], Mapping):
        result, info = result
    observation = _observation(result, "reset returned")
    if observation == ():
        raise ValueError("reset returned no messages: the agent needs something to answer")
    return ResetResult(as_messages(observation), _info(info, "reset"), _tools(tools))


def parse_step(result: Any) -> Step:
    """Validates the result of `step`; `ValueError` says what is wrong."""
    if isinstance(result, Step):
        result = (result.observation, result.reward, result.terminated, result.truncated, result.info)
    if not isinstance(result, tuple):
        raise ValueError(f"step returned {describe(result)}, not a Step{hint(result)}")
    if len(result) != 5:
        raise ValueError(f"step returned {len(result)} values, not 5: (observation, reward, terminated, truncated, info)")
    observation, reward, terminated, truncated, info = result
    step = Step(
        _observation(observation, "step returned, as observation,"),
        reward_of(reward, "step returned, as reward,"),
        _flag(terminated, "terminated"),
        _flag(truncated, "truncated"),
        _info(info, "step"),
    )
    if not step.done and step.observation == ():
        raise ValueError("step returned no messages, but the episode continues: the agent needs something to answer")
    return step


def tools_of(environment: Any) -> Any:
    """The tools that an environment declares."""
    tools = getattr(environment, "tools", ())
    return tools() if callable(tools) else tools


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(tool, Mapping) for tool in value):
        raise ValueError(f"the environment's tools are {describe(value)}, not a list of JSON schemas")
    try:
        return tuple(json.loads(json.dumps([dict(tool) for tool in value])))  # plain types: the pool unpickles no others
    except (TypeError, ValueError) as error:
        raise ValueError(f"the environment's tools are no JSON: {error}") from error


def _observation(value: Any, what: str) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        return _text(value, what)
    if isinstance(value, list | tuple):
        return tuple(_message(message, what) for message in value)
    raise ValueError(f"{what} {describe(value)}, not a text or a list of messages{hint(value)}")


def _message(value: Any, what: str) -> Message:
    if not isinstance(value, Mapping) or set(value) != {"role", "content"}:
        raise ValueError(f"{what} a list with {describe(value)} in it: a message has `role` and `content`, nothing else")
    for key in ("role", "content"):
        if not isinstance(value[key], str):
            raise ValueError(f"{what} a message whose {key} is {describe(value[key])}, not a text")
    return {"role": _text(value["role"], what), "content": _text(value["content"], what)}


def _text(value: str, what: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} text that is not Unicode: {error}; decode bytes with errors='replace'") from None
    return str.__str__(value)  # not a subclass: the pool may not be able to import it


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool) and type(value).__name__ not in ("bool", "bool_"):  # the last two are NumPy's
        raise ValueError(f"step returned, as {name}, {describe(value)}, not True or False")
    return bool(value)


def _info(value: Any, method: str) -> dict[str, float | str]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{method} returned, as info, {describe(value)}, not a mapping")
    info: dict[str, float | str] = {}
    for key, item in value.items():
        what = f"{method} returned, as info[{short_repr(key)}],"
        if not isinstance(key, str):
            raise ValueError(f"{what} a value whose name is {describe(key)}, not a text")
        name = _text(key, what)
        info[name] = _text(item, what) if isinstance(item, str) else metric_of(item, what)
    return info
