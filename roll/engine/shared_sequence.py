"""What runs in a slot of the engine: tokens, and the requests that have them so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from roll.data.routes import Routes
from roll.data.tokenlog import IntArray
from roll.engine.request import Completion, Finish, Progress, Request


@dataclass(eq=False)
class SequenceMember:
    """A request while it generates, as far as it differs from others with the same tokens."""

    request: Request
    logprobs: list[float] = field(default_factory=list)


@dataclass(eq=False)
class SharedSequence:
    """Tokens in a slot and the requests that have exactly these tokens so far.

    Requests with the same prompt start as one sequence; when they draw different tokens, it splits.
    """

    prompt: IntArray
    members: list[SequenceMember]
    version: int
    """Of the weights that began to compute the cached keys and values."""
    cached: int = 0
    hidden: Tensor | None = None
    """The hidden state the next token is drawn from; None until it is computed."""
    prompt_hidden: Tensor | None = None
    ids: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    said: tuple[int, ...] = ()
    """What its requests bring of their response, where that is computed again token by token, as when it was drawn: the
    first of `ids`."""

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.ids)

    @property
    def repeats(self) -> bool:
        """Whether its next token is known."""
        return len(self.ids) < len(self.said)

    @property
    def drawn(self) -> int:
        """Tokens its requests have got here."""
        return max(len(self.ids) - len(self.said), 0)

    @property
    def cached_tokens(self) -> IntArray:
        return np.concatenate([self.prompt, np.array(self.ids, np.int32)])[: self.cached]

    def completion(self, member: SequenceMember, finish: Finish, routes: Routes | None = None) -> Completion:
        drawn = self.since(member, 0)
        return Completion(drawn.id, drawn.ids, drawn.logprobs, drawn.versions, finish, routes)

    def since(self, member: SequenceMember, start: int) -> Progress:
        first = len(self.said) + start
        return Progress(
            member.request.id,
            start,
            np.array(self.ids[first:], np.int32),
            np.array(member.logprobs[start:], np.float32),
            np.array(self.versions[first:], np.int32),
        )
