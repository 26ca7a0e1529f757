"""The requests that enter an engine and the completions that leave it."""

from __future__ import annotations

import hashlib
from collections.abc import Container
from dataclasses import dataclass, field
from math import inf
from typing import Literal

import numpy as np

from roll.data.routes import Routes
from roll.data.tokenlog import FloatArray, IntArray

Finish = Literal["stop", "length", "abort"]
LEAST_TEMPERATURE = 1e-6
"""Smallest positive temperature: logits divided by less would overflow."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters. A token of `stop_ids` or a `stop` string ends a response; both stay in it."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    seed: int = 0

    @property
    def fault(self) -> str:
        """Describes the first invalid parameter; empty if all are valid."""
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
    """One sequence to continue. The sampling noise of a token depends only on the seed and its position in the sequence.
    So a request whose `ids` are the prompt and first tokens of another one continues exactly where that one stopped."""

    id: str
    ids: IntArray
    sampling: SamplingParams
    sampled_tokens: int = 0
    """How many of the last `ids` belong to the response, for example because another engine sampled them."""
    routes_from: int | None = 0
    """First of its tokens whose routes are reported, if the engine records routes; None for no routes."""

    @property
    def tokens(self) -> int:
        """The most tokens it may need: those it has and the new ones."""
        return len(self.ids) + self.sampling.max_new_tokens

    @property
    def need(self) -> str:
        """A sentence with that number, for error messages."""
        parts = f"{len(self.ids)} of prompt and {self.sampling.max_new_tokens} new"
        return f"request {self.id!r} may need {self.tokens} tokens ({parts})"

    @property
    def prompt(self) -> IntArray:
        return self.ids[: len(self.ids) - self.sampled_tokens]

    @property
    def response_ids(self) -> IntArray:
        """The tokens of the response that it already has."""
        return self.ids[len(self.ids) - self.sampled_tokens :]

    def check(self, here: Container[str], context: int, vocab: int) -> None:
        """Raises if an engine with this context and vocabulary cannot serve the request; `here` are the ids of its
        current requests."""
        if not len(self.ids):
            raise ValueError(f"request {self.id!r} has no tokens to continue")
        if self.sampling.max_new_tokens < 1:
            raise ValueError(f"request {self.id!r} asks for {self.sampling.max_new_tokens} new tokens")
        if self.id in here:
            raise ValueError(f"request {self.id!r} is here already")
        if self.tokens > context:
            raise ValueError(f"{self.need}, but the engine's context is {context}")
        if not 0 <= self.sampled_tokens < len(self.ids):
            raise ValueError(
                f"request {self.id!r} has {len(self.ids)} tokens, of which {self.sampled_tokens} cannot be sampled ones"
            )
        if self.routes_from is not None and not 0 <= self.routes_from <= len(self.ids):
            raise ValueError(
                f"request {self.id!r} has {len(self.ids)} tokens: there are no routes from number {self.routes_from} on"
            )
        if self.ids.view(np.uint32).max() >= vocab:  # a negative token is a large one without a sign
            least, most = self.ids.min(), self.ids.max()
            raise ValueError(f"request {self.id!r} has tokens {least} to {most}, but the model knows 0 to {vocab - 1}")
        if fault := self.sampling.fault:
            raise ValueError(f"request {self.id!r} asks for {fault}")


class RequestRejected(ValueError):
    """The engine can never run the request."""


@dataclass(frozen=True)
class Completion:
    """The generated tokens, each with the version of the weights and the log-prob under softmax(logits / temperature). If
    the engine records routes: those of the request's tokens and the sampled ones, from `routes_from` to the last token
    whose keys and values were computed, which is at most the one before the last sampled token."""

    id: str
    ids: IntArray = field(repr=False)
    logprobs: FloatArray = field(repr=False)
    versions: IntArray = field(repr=False)
    finish: Finish
    routes: Routes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Progress:
    """Tokens that a running request has sampled since the last report: those from index `start` on."""

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
    """A 64-bit seed from parts with a fixed text representation, such as the run's seed and a sample's id."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
