"""The running sequences as arrays: what a step is made of, and what steps have drawn, without a loop over sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from roll.data.routes import Routes
from roll.data.tokenlog import IntArray
from roll.engine.paged.blocks import Key
from roll.engine.paged.kv_cache import BLOCK
from roll.engine.paged.step_inputs import (
    DRAWS,
    HEADER,
    PLACE,
    POSITION,
    SEED_HIGH,
    SEED_LOW,
    SLOT,
    TEMPERATURE,
    TOKEN,
    Sheet,
)
from roll.engine.request import Completion, Finish, Progress, Request

_NO_STOP = -1
_NOBODY = -1
_Number = TypeVar("_Number", bound=np.generic)


@dataclass(eq=False)
class PagedSequence:
    """A request and what it has drawn so far, while it waits or runs."""

    request: Request
    tokens: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    """Drawn before it last came to wait; while it runs, its slot knows."""
    log_probs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    versions: list[tuple[int, int]] = field(default_factory=list)
    """From which drawn token on, which version of the weights."""
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    known: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    """Its tokens when it last began to wait or to run: the prompt and what it had drawn."""
    keys: list[Key] = field(default_factory=list)
    """Of the full blocks of these, under `version`."""
    filled: int = 0
    """How many of these are in the cache, or will be by a pass already launched. All but the last are filled as a prompt
    is; the last one is the first row that draws."""
    version: int = -1
    """Of the weights when it began to run. Where they have changed since, its cache is of several versions."""
    routes: list[Routes] = field(default_factory=list)
    """Recorded before it last gave its blocks up, where they are, from the request's `routes_from` on."""

    @property
    def left_to_fill(self) -> int:
        return len(self.known) - 1 - self.filled

    def draws_under(self, version: int, drawn: int) -> None:
        """Tokens from number `drawn` on are this version's."""
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((drawn, version))

    def versions_of(self, drawn: int) -> IntArray:
        versions = np.empty(drawn, np.int32)
        for start, version in self.versions:
            versions[start:] = version
        return versions

    @property
    def routes_from(self) -> int | None:
        """The first position whose routes are still to be told; None where none are."""
        start = self.request.routes_from
        return None if start is None else start + sum(map(len, self.routes))

    def completion(self, finish: Finish) -> Completion:
        routes: Routes | None = np.concatenate(self.routes) if self.routes else None  # type: ignore[assignment]
        versions = self.versions_of(len(self.tokens))
        return Completion(self.request.id, self.tokens, self.log_probs, versions, finish, routes)

    def since(self, start: int) -> Progress:
        versions = self.versions_of(len(self.tokens))
        return Progress(self.request.id, start, self.tokens[start:], self.log_probs[start:], versions[start:])


class BatchState:
    """One line a slot. Every sequence that enters begins a new `slot_epoch`, so that what a step drew for the one before
    it is known as such."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.sequences: list[PagedSequence | None] = [None] * count
        self._free = list(reversed(range(count)))
        self._reigns = 0
        self.slot_epoch = np.full(count, _NOBODY, np.int64)
        self.draws = np.zeros(count, bool)
        """Whether its prompt is in the cache, so that it draws a token a step."""
        self.prompt = np.zeros(count, np.int64)
        self.launched = np.zeros(count, np.int64)
        """Tokens that launched steps draw or have drawn."""
        self.drawn = np.zeros(count, np.int64)
        """Tokens that are known here."""
        self.limit = np.zeros(count, np.int64)
        self.given = np.full(count, _NO_STOP, np.int64)
        """The token of the next row, where it is not the last drawn one."""
        self.seeds = np.zeros(count, np.uint64)
        self.temperatures = np.zeros(count, np.float32)
        self.truncates = np.zeros(count, bool)
        self.has_strings = np.zeros(count, bool)
        self.stops = np.full((count, 1), _NO_STOP, np.int64)
        self.held = np.zeros(count, np.int64)
        """Blocks it has."""
        self.table = np.zeros((4, count), np.int32)
        """[blocks, slots]"""
        self.tokens = np.zeros((count, 64), np.int32)
        self.log_probs = np.zeros((count, 64), np.float32)

    @property
    def running(self) -> int:
        return self.count - len(self._free)

    @property
    def positions(self) -> NDArray[np.int64]:
        """Of each slot's next row that draws."""
        return self.prompt + self.launched - 1

    def enter(self, sequence: PagedSequence) -> None:
        slot = sequence.slot = self._free.pop()
        sampling = sequence.request.sampling
        self.sequences[slot] = sequence
        drawn = len(sequence.tokens)
        self._reigns += 1
        self.slot_epoch[slot] = self._reigns
        self.draws[slot] = False
        self.prompt[slot] = len(sequence.request.ids)
        self.launched[slot] = self.drawn[slot] = drawn
        self.limit[slot] = sampling.max_new_tokens
        self.given[slot] = sequence.known[-1]
        self.seeds[slot] = sampling.seed & 0xFFFFFFFFFFFFFFFF
        self.temperatures[slot] = sampling.temperature
        self.truncates[slot] = sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)
        self.has_strings[slot] = bool(sampling.stop)
        if len(sampling.stop_ids) > self.stops.shape[1]:
            self.stops = _wider(self.stops, len(sampling.stop_ids), _NO_STOP)
        self.stops[slot] = _NO_STOP
        self.stops[slot, : len(sampling.stop_ids)] = sampling.stop_ids
        self._make_room(drawn)
        self.tokens[slot, :drawn] = sequence.tokens
        self.log_probs[slot, :drawn] = sequence.log_probs
        self.held[slot] = 0
        blocks, sequence.blocks = sequence.blocks, []
        self.hold(sequence, blocks)

    def hold(self, sequence: PagedSequence, blocks: list[int]) -> None:
        """The sequence has these blocks too."""
        sequence.blocks.extend(blocks)
        start, end = int(self.held[sequence.slot]), len(sequence.blocks)
        if end > len(self.table):
            self.table = _longer(self.table, end)
        self.table[start:end, sequence.slot] = blocks
        self.held[sequence.slot] = end

    def leave(self, sequence: PagedSequence) -> None:
        """The sequence takes what it has drawn with it."""
        slot = sequence.slot
        self.bring_up(sequence)
        self.sequences[slot] = None
        self.slot_epoch[slot] = _NOBODY
        self.draws[slot] = False
        self.held[slot] = 0
        self._free.append(slot)
        sequence.slot = -1

    def bring_up(self, sequence: PagedSequence) -> None:
        """Tells the sequence what it has drawn so far."""
        drawn = int(self.drawn[sequence.slot])
        sequence.tokens = self.tokens[sequence.slot, :drawn].copy()
        sequence.log_probs = self.log_probs[sequence.slot, :drawn].copy()

    def record(self, slots: NDArray[np.int64], tokens: IntArray, log_probs: NDArray[np.float32]) -> NDArray[np.bool_]:
        """One token for each of these slots; which of them end with it, by a token or by their length."""
        at = self.drawn[slots]
        self._make_room(int(at.max()) + 1)
        self.tokens[slots, at] = tokens
        self.log_probs[slots, at] = log_probs
        self.drawn[slots] = at + 1
        ended: NDArray[np.bool_] = at + 1 >= self.limit[slots]
        for stops in self.stops.T:
            ended |= stops[slots] == tokens
        return ended

    def finish_of(self, slot: int) -> Finish:
        """Why a slot that `record` said has ended did."""
        return "stop" if (self.stops[slot] == self.tokens[slot, self.drawn[slot] - 1]).any() else "length"

    def places(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where in the cache these positions are."""
        places: NDArray[np.int64] = self.table[positions // BLOCK, slots].astype(np.int64) * BLOCK + positions % BLOCK
        return places

    def _make_room(self, drawn: int) -> None:
        if drawn > self.tokens.shape[1]:
            self.tokens = _wider(self.tokens, 2 * drawn, 0)
            self.log_probs = _wider(self.log_probs, 2 * drawn, 0)


def prompt_sheet(slots: BatchState, sequence: PagedSequence, count: int, lines: int) -> Sheet:
    """The next `count` rows of a sequence's prompt, with so many lines of blocks."""
    positions = np.arange(sequence.filled, sequence.filled + count)
    own = np.full(count, sequence.slot)
    sheet = np.zeros((HEADER + lines, count), np.int32)
    sheet[SLOT] = own
    sheet[POSITION] = positions
    sheet[TOKEN] = sequence.known[positions]
    sheet[PLACE] = slots.places(own, positions)
    sheet[HEADER:] = slots.table[:lines, [sequence.slot]]
    return sheet


def drawing_sheet(slots: BatchState, drawing: NDArray[np.int64], lines: int) -> Sheet:
    """The next row of each of these slots, after which it draws."""
    positions = slots.positions[drawing]
    sheet = np.zeros((HEADER + lines, len(drawing)), np.int32)
    sheet[SLOT] = drawing
    sheet[POSITION] = positions
    sheet[TOKEN] = slots.given[drawing]
    sheet[PLACE] = slots.places(drawing, positions)
    sheet[DRAWS] = 1
    seeds = slots.seeds[drawing]
    sheet[SEED_LOW] = (seeds & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32)
    sheet[SEED_HIGH] = (seeds >> np.uint64(32)).astype(np.uint32).view(np.int32)
    sheet[TEMPERATURE] = slots.temperatures[drawing].view(np.int32)
    sheet[HEADER:] = slots.table[:lines, drawing]
    return sheet


def _wider(array: NDArray[_Number], columns: int, filler: int) -> NDArray[_Number]:
    wide = np.full((array.shape[0], columns), filler, array.dtype)
    wide[:, : array.shape[1]] = array
    return wide


def _longer(table: NDArray[np.int32], lines: int) -> NDArray[np.int32]:
    longer = np.zeros((2 * lines, table.shape[1]), np.int32)
    longer[: len(table)] = table
    return longer
