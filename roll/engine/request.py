"""What enters and leaves an engine."""

from __future__ import annotations

import hashlib
from collections.abc import Container
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from roll.data.routes import Routes
from roll.data.tokenlog import FloatArray, IntArray

Finish = Literal["stop", "length", "abort"]
LEAST_TEMPERATURE = 1e-6
"""Nearer to 0, logits divided by it are no numbers any more."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. `stop_ids` end a response, as do `stop` strings; both stay in it."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    seed: int = 0

    @property
    def fault(self) -> str:
        """What nobody can draw by; empty where there is nothing."""
        if self.temperature != 0 and not LEAST_TEMPERATURE <= self.temperature < inf:
            return f"temperature {self.temperature:g}, which must be 0, or {LEAST_TEMPERATURE:g} and above"
        if not 0 < self.top_p <= 1:
            return f"top_p {self.top_p:g}, which must be above 0 and at most 1"
        if not 0 <= self.seed < 1 << 64:
            return f"seed {self.seed}, which must have 64 bits and no sign"
        if any(not 0 <= token < 1 << 31 for token in self.stop_ids):
            return f"stop_ids {self.stop_ids}, which must be tokens"
        if not all(text and is_utf8(text) for text in self.stop):
            return f"stop {self.stop!r}, which must be texts that UTF-8 can hold"
        return ""


@dataclass(frozen=True)
class Request:
    """One sequence to continue. The noise of a token depends on the seed and its position in the sequence alone, so a
    request whose `ids` are another's prompt and first tokens goes on exactly where that one stopped."""

    id: str
    ids: IntArray
    sampling: SamplingParams
    drawn: int = 0
    """How many of the last `ids` are of the response it goes on with, which it has from another engine, say."""
    routes_from: int | None = 0
    """From which of its tokens on it is to be told which experts they were sent to, where an engine records that; None
    for nothing of it."""

    @property
    def tokens(self) -> int:
        """Those it may need, of the prompt and new."""
        return len(self.ids) + self.sampling.max_new_tokens

    @property
    def need(self) -> str:
        """The same in words, for whoever has to refuse it."""
        parts = f"{len(self.ids)} of prompt and {self.sampling.max_new_tokens} new"
        return f"request {self.id!r} may need {self.tokens} tokens ({parts})"

    @property
    def prompt(self) -> IntArray:
        return self.ids[: len(self.ids) - self.drawn]

    @property
    def said(self) -> IntArray:
        """What it has of the response."""
        return self.ids[len(self.ids) - self.drawn :]

    def check(self, here: Container[str], context: int, vocab: int) -> None:
        """Refuses what no engine of this context can serve beside the requests that are `here`."""
        if not len(self.ids):
            raise ValueError(f"request {self.id!r} has no tokens to continue")
        if self.sampling.max_new_tokens < 1:
            raise ValueError(f"request {self.id!r} asks for {self.sampling.max_new_tokens} new tokens")
        if self.id in here:
            raise ValueError(f"request {self.id!r} is here already")
        if self.tokens > context:
            raise ValueError(f"{self.need}, but the engine's context is {context}")
        if not 0 <= self.drawn < len(self.ids):
            raise ValueError(
                f"request {self.id!r} has {len(self.ids)} tokens, of which {self.drawn} cannot be drawn ones"
            )
        if self.routes_from is not None and not 0 <= self.routes_from <= len(self.ids):
            raise ValueError(
                f"request {self.id!r} has {len(self.ids)} tokens: there are no routes from number {self.routes_from} on"
            )
        least, most = self.ids.min(), self.ids.max()
        if least < 0 or most >= vocab:
            raise ValueError(f"request {self.id!r} has tokens {least} to {most}, but the model knows 0 to {vocab - 1}")
        if fault := self.sampling.fault:
            raise ValueError(f"request {self.id!r} asks for {fault}")


@dataclass(frozen=True)
class Completion:
    """What was generated: a version and a log-prob under softmax(logits / temperature) for every token. An engine that
    records routes gives those of the request's tokens and the drawn ones, from `routes_from` on to the last whose keys
    and values were computed: that is, at most, all but the last drawn one."""

    id: str
    ids: IntArray = field(repr=False)
    logprobs: FloatArray = field(repr=False)
    versions: IntArray = field(repr=False)
    finish: Finish
    routes: Routes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Progress:
    """Tokens a running request has drawn since it was last heard of: those from number `start` on."""

    id: str
    start: int
    ids: IntArray = field(repr=False)
    logprobs: FloatArray = field(repr=False)
    versions: IntArray = field(repr=False)


def is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def seed_of(*parts: object) -> int:
    """A 64-bit seed from anything that has a fixed text: the run's seed and a sample's id, say."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
