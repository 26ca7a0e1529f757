"""The token log: what happened in one attempt, append-only.

Invariants: segments are never changed or removed once appended; every response token has the log-probability with which
the sampler drew it and the version of the weights that drew it (0 and none for a response that was not sampled but is
only imitated); the loss mask is exactly the response tokens. The log may also have the experts that a branch's first
tokens were routed to (`routes.py`).
Training tensors are views of this log, so the trained tokens are exactly the sampled tokens.

A log may fork: if the next input cannot follow the tokens before it (a chat template would rewrite them, or the
conversation is shortened), the log continues with a new prompt, and the tokens after it attend only to that branch. The
branches are separate sequences, trained together as one attempt.

Example: a prompt of 5 tokens, a response of 2 sampled by version 3, an observation of 4 and a response of 1 sampled by
version 4 give `ids` of length 12, a mask true at 5, 6 and 11, versions -1 everywhere but 3, 3 and 4 there, and turns -1
everywhere but 0, 0 and 1 there. If it had forked instead of the observation, the turn at 7 would be -2: a branch begins
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from roll.data.routes import NO_ROUTES, Routes, unrecorded_rows, unrecorded_value

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
Kind = Literal["prompt", "response", "observation"]
_Number = TypeVar("_Number", bound=np.generic)

NO_VERSION = -1
NO_TURN = -1
FORK = -2
"""Instead of `NO_TURN`: this token begins a branch."""


@dataclass(frozen=True)
class Segment:
    """A run of tokens of one kind. Only a response has log-probs and versions."""

    kind: Kind
    ids: IntArray
    logprobs: FloatArray | None = None
    versions: IntArray | None = None


class _Columns:
    """The flat columns of a log. They grow in place: an array that was returned keeps its values, and an append costs as
    much as its own tokens."""

    def __init__(self) -> None:
        self.length = 0
        self.ids = np.empty(0, np.int32)
        self.behaviour = np.empty(0, np.float32)
        self.versions = np.empty(0, np.int32)
        self.turn = np.empty(0, np.int32)

    def append(
        self,
        ids: Sequence[int] | IntArray,
        turn: int,
        logprobs: Sequence[float] | FloatArray | float = 0.0,
        versions: Sequence[int] | IntArray | int = NO_VERSION,
    ) -> None:
        start, end = self.length, self.length + len(ids)
        if end > len(self.ids):
            self._grow(max(end, 2 * len(self.ids)))
        self.ids[start:end] = ids
        self.behaviour[start:end] = logprobs
        self.versions[start:end] = versions
        self.turn[start:end] = turn
        self.length = end

    def _grow(self, capacity: int) -> None:
        for name in ("ids", "behaviour", "versions", "turn"):
            old = getattr(self, name)
            new = np.empty(capacity, old.dtype)
            new[: self.length] = old[: self.length]
            setattr(self, name, new)


class TokenLog:
    """Append-only segments of one attempt, kept as flat columns. The columns that it returns are read-only."""

    def __init__(self) -> None:
        self._columns = _Columns()
        self._ends: list[tuple[Kind, int]] = []
        """The kind of each segment, and the number of tokens up to its end."""
        self._segments: list[Segment] = []
        """The first segments, as far as they were asked for."""
        self._responses = 0
        self._response_tokens = 0
        self._branch_start = 0
        """The first token of the last branch."""
        self._routes: list[tuple[int, Routes]] = []
        """Recorded routes: the first token's index, and one row per token."""
        self._routed = 0

    @classmethod
    def from_columns(
        cls,
        ids: IntArray,
        loss_mask: BoolArray,
        behaviour: FloatArray,
        versions: IntArray,
        turn: IntArray,
        routes: Routes = NO_ROUTES,
    ) -> TokenLog:
        """The log with these columns; tokens between two responses become one segment."""
        assert np.array_equal(loss_mask, turn >= 0), "a log's mask is exactly its responses"
        log, responses = cls(), 0
        forks = turn == FORK
        begins = np.diff(np.where(forks, NO_TURN, turn), prepend=NO_TURN - 1) != 0
        for span in np.split(np.arange(len(ids)), np.flatnonzero(begins | forks)):
            if not len(span):
                continue
            if turn[span[0]] < 0:
                (log.fork if forks[span[0]] else log.observe if log._ends else log.prompt)(ids[span])
                continue
            for _ in range(responses, turn[span[0]]):
                log.respond([], [], [])  # a response without tokens is visible only in the numbering
            log.respond(ids[span], behaviour[span], versions[span])
            responses = int(turn[span[0]]) + 1
        if routes.shape[1]:
            for branch in branches(turn):
                log._routed = 0
                log._keep_routes(branch.start, _trim_unrecorded(routes[branch]))
        return log

    @classmethod
    def from_loss_mask(cls, ids: Sequence[int] | IntArray, loss_mask: Sequence[bool] | BoolArray) -> TokenLog:
        """Tokens that were not sampled: responses to imitate, with log-prob 0 and no version."""
        mask = np.asarray(loss_mask, np.bool_)
        begins = mask & ~np.concatenate([[False], mask[:-1]])
        turn = np.where(mask, np.cumsum(begins) - 1, NO_TURN)
        none = np.full(len(mask), NO_VERSION, np.int32)
        return cls.from_columns(np.asarray(ids, np.int32), mask, np.zeros(len(mask), np.float32), none, turn)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """What was appended, in order."""
        start = self._ends[len(self._segments) - 1][1] if self._segments else 0
        for kind, end in self._ends[len(self._segments) :]:
            self._segments.append(self._segment(kind, slice(start, end)))
            start = end
        return tuple(self._segments)

    def _segment(self, kind: Kind, tokens: slice) -> Segment:
        if kind != "response":
            return Segment(kind, self.ids[tokens])
        return Segment(kind, self.ids[tokens], self.behaviour[tokens], self.versions[tokens])

    def __len__(self) -> int:
        return self._columns.length

    def prompt(self, ids: Sequence[int] | IntArray) -> None:
        """Appends tokens of a prompt, which are not trained on."""
        if self._ends:
            raise ValueError("a token log begins with its prompt: later input is an observation")
        self._columns.append(ids, NO_TURN)
        self._end_segment("prompt")

    def fork(self, ids: Sequence[int] | IntArray) -> None:
        """Begins a branch with this prompt."""
        if not self._ends or not len(ids):
            raise ValueError("a branch begins with its prompt, after the log has begun with one")
        start = len(self)
        self._columns.append(ids, NO_TURN)
        self._columns.turn[start] = FORK
        self._branch_start, self._routed = start, 0
        self._end_segment("prompt")

    def observe(self, ids: Sequence[int] | IntArray) -> None:
        """Appends tokens of an environment's observation, which are not trained on."""
        if not self._ends:
            raise ValueError("a token log begins with its prompt, not with an observation")
        self._columns.append(ids, NO_TURN)
        self._end_segment("observation")

    def respond(
        self,
        ids: Sequence[int] | IntArray,
        logprobs: Sequence[float] | FloatArray,
        versions: Sequence[int] | IntArray,
        routes: Routes | None = None,
    ) -> None:
        """Appends sampled tokens with the sampler's log-probabilities and weight versions. `routes` has the rows of the
        branch's tokens from index `routed_tokens` on, including these, as far as they are known."""
        if not self._ends:
            raise ValueError("a token log begins with its prompt, not with a response")
        if not len(ids) == len(logprobs) == len(versions):
            raise ValueError(f"{len(ids)} response tokens with {len(logprobs)} log-probs and {len(versions)} versions")
        self._columns.append(ids, self._responses, logprobs, versions)
        self._responses += 1
        self._response_tokens += len(ids)
        self._end_segment("response")
        if routes is not None:
            self._keep_routes(self._branch_start + self._routed, _read_only(routes, routes.dtype))

    def _keep_routes(self, start: int, routes: Routes) -> None:
        """Stores the routes of tokens of the last branch, from `start` on."""
        assert routes.ndim == 2, f"routes have one row per token, not the shape {routes.shape}"
        first = self._routes[0][1] if self._routes else routes
        if (routes.shape[1], routes.dtype) != (first.shape[1], first.dtype):
            raise ValueError(
                f"routes of {routes.shape[1]} {routes.dtype} per token follow {first.shape[1]} {first.dtype}"
            )
        if start + len(routes) > len(self):
            raise ValueError(f"routes of {len(routes)} tokens from number {start} on, in a log of {len(self)}")
        if routes.size:
            self._routes.append((start, routes))
            self._routed += len(routes)

    def _end_segment(self, kind: Kind) -> None:
        self._ends.append((kind, len(self)))

    def imitate(self, ids: Sequence[int] | IntArray) -> None:
        """Appends a response that was not sampled."""
        self.respond(ids, np.zeros(len(ids), np.float32), np.full(len(ids), NO_VERSION, np.int32))

    @property
    def ids(self) -> IntArray:
        """All token ids."""
        return self._view(self._columns.ids)

    @property
    def context(self) -> IntArray:
        """The context of the next token: the tokens of the last branch."""
        return self.ids[self._branch_start :]

    @property
    def context_tokens(self) -> int:
        """Number of tokens in the context."""
        return len(self) - self._branch_start

    @property
    def loss_mask(self) -> BoolArray:
        """Whether each token was sampled, and so may be trained on."""
        return self.turn >= 0

    @property
    def behaviour(self) -> FloatArray:
        """The sampler's log-probs; 0 if the token was not sampled."""
        return self._view(self._columns.behaviour)

    @property
    def versions(self) -> IntArray:
        """The version that sampled each token; `NO_VERSION` if the token was not sampled."""
        return self._view(self._columns.versions)

    @property
    def turn(self) -> IntArray:
        """The index of each token's response; `NO_TURN` if the token was not sampled, `FORK` if it begins a branch."""
        return self._view(self._columns.turn)

    def _view(self, column: NDArray[_Number]) -> NDArray[_Number]:
        view = column[: len(self)]
        view.setflags(write=False)
        return view

    @property
    def routes(self) -> Routes:
        """The experts that each token was routed to, one row per token."""
        if not self._routes:
            return np.zeros((len(self), 0), NO_ROUTES.dtype)
        routes = unrecorded_rows(len(self), self._routes[0][1])
        for start, rows in self._routes:
            routes[start : start + len(rows)] = rows
        return routes

    @property
    def routed_tokens(self) -> int:
        """Number of the last branch's tokens, from its first on, whose routes are recorded."""
        return self._routed

    @property
    def response_tokens(self) -> int:
        """Number of sampled tokens."""
        return self._response_tokens


def branches(turn: IntArray) -> list[slice]:
    """The slices of a log's branches, from its `turn` column."""
    ends = [0, *np.flatnonzero(turn == FORK).tolist(), len(turn)]
    return [slice(begin, end) for begin, end in pairwise(ends)]


def common_prefix(a: IntArray, b: IntArray) -> int:
    """The length of the common prefix of two sequences."""
    length = min(len(a), len(b))
    differing = np.flatnonzero(a[:length] != b[:length])
    return int(differing[0]) if len(differing) else length


def share_prefix(a: IntArray, b: IntArray, count: int) -> bool:
    """Whether two sequences agree in their first `count` tokens. The last of these is compared first, since it differs in
    most cases in which they do not."""
    if count < 1:
        return True
    if count > min(len(a), len(b)) or a[count - 1] != b[count - 1]:
        return False
    return np.array_equal(a[:count], b[:count])


def _trim_unrecorded(routes: Routes) -> Routes:
    """The routes without trailing unrecorded rows."""
    known = np.flatnonzero((routes != unrecorded_value(routes)).any(axis=1))
    return _read_only(routes[: known[-1] + 1 if len(known) else 0], routes.dtype)


def _read_only(values: object, dtype: Any) -> NDArray[Any]:
    array = np.array(values, dtype=dtype)
    array.setflags(write=False)
    return array
