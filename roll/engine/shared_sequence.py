"""The contents of an engine slot: tokens, and the requests that have exactly these tokens so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from torch import Tensor

from roll.data.routes import Routes
from roll.data.tokenlog import IntArray
from roll.engine.prefix_index import TOKEN_BYTES, Key, key_of
from roll.engine.request import Completion, Finish, Progress, Request


@dataclass(eq=False)
class SequenceMember:
    """The state of a running request that it does not share with others of the same sequence."""

    request: Request
    logprobs: list[float] = field(default_factory=list)


@dataclass(eq=False)
class SharedSequence:
    """Tokens in a slot and the requests that have exactly these tokens so far.

    Requests with the same prompt start as one sequence; when they sample different tokens, it splits.
    """

    prompt: IntArray
    members: list[SequenceMember]
    version: int
    """Version of the weights that the first cached keys and values were computed with."""
    cached: int = 0
    hidden: Tensor | None = None
    """The hidden state that the next token is sampled from; None until it is computed."""
    prompt_hidden: Tensor | None = None
    ids: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    forced_ids: tuple[int, ...] = ()
    """Response tokens that its requests bring along and that are recomputed token by token, as when they were sampled;
    they are the first of `ids`."""
    slot: int = field(default=-1, init=False)
    """Its slot in the KV cache, while it runs and while it is kept."""
    shared_key: Key = field(default=b"", init=False)
    """The key of the tokens that other sequences find it by."""

    @cached_property
    def prompt_key(self) -> Key:
        return key_of(self.prompt)

    @property
    def shared_tokens(self) -> int:
        """Number of tokens that other sequences find it by."""
        return len(self.shared_key) // TOKEN_BYTES

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.ids)

    @property
    def repeats(self) -> bool:
        """Whether its next token is already known."""
        return len(self.ids) < len(self.forced_ids)

    @property
    def sampled(self) -> int:
        """Number of tokens sampled in this engine."""
        return max(len(self.ids) - len(self.forced_ids), 0)

    @property
    def cached_tokens(self) -> IntArray:
        return np.concatenate([self.prompt, np.array(self.ids, np.int32)])[: self.cached]

    def completion(self, member: SequenceMember, finish: Finish, routes: Routes | None = None) -> Completion:
        tokens = self.since(member, 0)
        return Completion(tokens.id, tokens.ids, tokens.logprobs, tokens.versions, finish, routes)

    def since(self, member: SequenceMember, start: int) -> Progress:
        first = len(self.forced_ids) + start
        return Progress(
            member.request.id,
            start,
            np.array(self.ids[first:], np.int32),
            np.array(member.logprobs[start:], np.float32),
            np.array(self.versions[first:], np.int32),
        )
