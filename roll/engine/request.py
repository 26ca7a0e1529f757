"""What enters and leaves an engine."""

from __future__ import annotations

import hashlib
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Literal

from roll.data.tokenlog import FloatArray, IntArray

Finish = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `stop_ids` end a response, as do `stop` strings; both stay in it."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Request:
    """One sequence to continue. The noise of a token depends on the seed and its position in the sequence alone, so a
    request whose `ids` are another's prompt and first tokens goes on exactly where that one stopped."""

    id: str
    ids: IntArray
    sampling: Sampling

    @property
    def tokens(self) -> int:
        """Those it may need, of the prompt and new."""
        return len(self.ids) + self.sampling.max_new_tokens

    @property
    def need(self) -> str:
        """The same in words, for whoever has to refuse it."""
        parts = f"{len(self.ids)} of prompt and {self.sampling.max_new_tokens} new"
        return f"request {self.id!r} may need {self.tokens} tokens ({parts})"

    def check(self, here: Container[str], context: int) -> None:
        """Refuses what no engine of this context can serve beside the requests that are `here`."""
        if not len(self.ids):
            raise ValueError(f"request {self.id!r} has no tokens to continue")
        if self.sampling.max_new_tokens < 1:
            raise ValueError(f"request {self.id!r} asks for {self.sampling.max_new_tokens} new tokens")
        if self.id in here:
            raise ValueError(f"request {self.id!r} is here already")
        if self.tokens > context:
            raise ValueError(f"{self.need}, but the model's context is {context}")


@dataclass(frozen=True)
class Completion:
    """What was generated: a version and a log-prob under softmax(logits / temperature) for every token."""

    id: str
    ids: IntArray = field(repr=False)
    logprobs: FloatArray = field(repr=False)
    versions: IntArray = field(repr=False)
    finish: Finish


@dataclass(frozen=True)
class Progress:
    """Tokens a running request has drawn since it was last heard of: those from number `start` on."""

    id: str
    start: int
    ids: IntArray = field(repr=False)
    logprobs: FloatArray = field(repr=False)
    versions: IntArray = field(repr=False)


def seed_of(*parts: object) -> int:
    """A 64-bit seed from anything that has a fixed text: the run's seed and a sample's id, say."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
