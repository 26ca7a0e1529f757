"""The running sequences as arrays with one entry per slot: building the inputs of a step and recording its tokens needs
no loop over sequences."""

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
    CACHE_POSITION,
    HEADER,
    POSITION,
    SAMPLES,
    SEED_HIGH,
    SEED_LOW,
    SLOT,
    TEMPERATURE,
    TOKEN,
    InputTable,
)
from roll.engine.request import Completion, Finish, Progress, Request

_NO_STOP = -1
_NO_SEQUENCE = -1
_Number = TypeVar("_Number", bound=np.generic)


@dataclass(eq=False)
class PagedSequence:
    """A request, waiting or running, and the tokens it has so far."""

    request: Request
    tokens: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    """Tokens sampled before the sequence last started to wait. While it runs, `BatchState` has the current ones."""
    log_probs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(index of the first sampled token, version of the weights) for every change of version."""
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    known: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    """Its tokens when it was last queued or admitted: the prompt and the tokens sampled by then."""
    keys: list[Key] = field(default_factory=list)
    """Keys of the full blocks of `known`, under `version`."""
    filled: int = 0
    """How many tokens of `known` are in the KV cache, or will be after a pass that is already launched. All but the last
    are prefilled; the last one is the first row that samples."""
    version: int = -1
    """Version of the weights when it started to run. If the weights have changed since, its KV cache entries have several
    versions."""
    routes: list[Routes] = field(default_factory=list)
    """Routes read before its blocks were last released, from the request's `routes_from` on."""

    @property
    def remaining_prefill(self) -> int:
        return len(self.known) - 1 - self.filled

    def start_version(self, version: int, sampled: int) -> None:
        """Sampled tokens from index `sampled` on have this version."""
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((sampled, version))

    def versions_of(self, sampled: int) -> IntArray:
        versions = np.empty(sampled, np.int32)
        for start, version in self.versions:
            versions[start:] = version
        return versions

    @property
    def routes_from(self) -> int | None:
        """The first position whose routes are still to be reported; None if the request asks for none."""
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
    """One entry per slot. Each sequence that enters a slot gets a new `slot_epoch`, so that tokens sampled for the
    previous sequence of the slot can be recognised and discarded."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.sequences: list[PagedSequence | None] = [None] * count
        self._free = list(reversed(range(count)))
        self._epochs = 0
        self.slot_epoch = np.full(count, _NO_SEQUENCE, np.int64)
        self.is_sampling = np.zeros(count, bool)
        """Whether the prompt is in the cache, so that the slot samples one token per step."""
        self.prompt = np.zeros(count, np.int64)
        self.launched = np.zeros(count, np.int64)
        """Sampled tokens, including those of steps in flight."""
        self.sampled = np.zeros(count, np.int64)
        """Sampled tokens that the host has read."""
        self.limit = np.zeros(count, np.int64)
        self.given = np.full(count, _NO_STOP, np.int64)
        """The input token of the next row if it is not the last sampled one; `LAST_SAMPLED` if it is."""
        self.seeds = np.zeros(count, np.uint64)
        self.temperatures = np.zeros(count, np.float32)
        self.truncates = np.zeros(count, bool)
        self.has_strings = np.zeros(count, bool)
        self.stops = np.full((count, 1), _NO_STOP, np.int64)
        self.block_counts = np.zeros(count, np.int64)
        """Number of blocks."""
        self.block_table = np.zeros((4, count), np.int32)
        """[blocks, slots]"""
        self.tokens = np.zeros((count, 64), np.int32)
        self.log_probs = np.zeros((count, 64), np.float32)

    @property
    def running(self) -> int:
        return self.count - len(self._free)

    @property
    def positions(self) -> NDArray[np.int64]:
        """The position of each slot's next row that samples."""
        return self.prompt + self.launched - 1

    def enter(self, sequence: PagedSequence) -> None:
        slot = sequence.slot = self._free.pop()
        sampling = sequence.request.sampling
        self.sequences[slot] = sequence
        sampled = len(sequence.tokens)
        self._epochs += 1
        self.slot_epoch[slot] = self._epochs
        self.is_sampling[slot] = False
        self.prompt[slot] = len(sequence.request.ids)
        self.launched[slot] = self.sampled[slot] = sampled
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
        self._reserve_tokens(sampled)
        self.tokens[slot, :sampled] = sequence.tokens
        self.log_probs[slot, :sampled] = sequence.log_probs
        self.block_counts[slot] = 0
        blocks, sequence.blocks = sequence.blocks, []
        self.add_blocks(sequence, blocks)

    def add_blocks(self, sequence: PagedSequence, blocks: list[int]) -> None:
        """Appends blocks to the sequence's block table."""
        sequence.blocks.extend(blocks)
        start, end = int(self.block_counts[sequence.slot]), len(sequence.blocks)
        if end > len(self.block_table):
            self.block_table = _longer(self.block_table, end)
        self.block_table[start:end, sequence.slot] = blocks
        self.block_counts[sequence.slot] = end

    def remove(self, sequence: PagedSequence) -> None:
        """Frees the slot. The sequence keeps its sampled tokens."""
        slot = sequence.slot
        self.copy_tokens(sequence)
        self.sequences[slot] = None
        self.slot_epoch[slot] = _NO_SEQUENCE
        self.is_sampling[slot] = False
        self.block_counts[slot] = 0
        self._free.append(slot)
        sequence.slot = -1

    def copy_tokens(self, sequence: PagedSequence) -> None:
        """Copies the tokens sampled so far into the sequence."""
        sampled = int(self.sampled[sequence.slot])
        sequence.tokens = self.tokens[sequence.slot, :sampled].copy()
        sequence.log_probs = self.log_probs[sequence.slot, :sampled].copy()

    def record(self, slots: NDArray[np.int64], tokens: IntArray, log_probs: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Appends one token to each of these slots. Returns which of them have ended, by a stop token or by their
        length."""
        at = self.sampled[slots]
        self._reserve_tokens(int(at.max()) + 1)
        self.tokens[slots, at] = tokens
        self.log_probs[slots, at] = log_probs
        self.sampled[slots] = at + 1
        ended: NDArray[np.bool_] = at + 1 >= self.limit[slots]
        for stops in self.stops.T:
            ended |= stops[slots] == tokens
        return ended

    def finish_of(self, slot: int) -> Finish:
        """Why a slot has ended, given that `record` reported it as ended."""
        return "stop" if (self.stops[slot] == self.tokens[slot, self.sampled[slot] - 1]).any() else "length"

    def cache_positions(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The cache positions (block · BLOCK + offset) of these positions of the slots' sequences."""
        found: NDArray[np.int64] = (
            self.block_table[positions // BLOCK, slots].astype(np.int64) * BLOCK + positions % BLOCK
        )
        return found

    def _reserve_tokens(self, sampled: int) -> None:
        if sampled > self.tokens.shape[1]:
            self.tokens = _wider(self.tokens, 2 * sampled, 0)
            self.log_probs = _wider(self.log_probs, 2 * sampled, 0)


def prefill_inputs(slots: BatchState, sequence: PagedSequence, count: int, lines: int) -> InputTable:
    """The inputs of the next `count` prompt rows of a sequence, with `lines` lines of its block table."""
    positions = np.arange(sequence.filled, sequence.filled + count)
    slot_column = np.full(count, sequence.slot)
    table = np.zeros((HEADER + lines, count), np.int32)
    table[SLOT] = slot_column
    table[POSITION] = positions
    table[TOKEN] = sequence.known[positions]
    table[CACHE_POSITION] = slots.cache_positions(slot_column, positions)
    table[HEADER:] = slots.block_table[:lines, [sequence.slot]]
    return table


def decode_inputs(slots: BatchState, active: NDArray[np.int64], lines: int) -> InputTable:
    """The inputs of the next row of each of these slots, which all sample a token."""
    positions = slots.positions[active]
    table = np.zeros((HEADER + lines, len(active)), np.int32)
    table[SLOT] = active
    table[POSITION] = positions
    table[TOKEN] = slots.given[active]
    table[CACHE_POSITION] = slots.cache_positions(active, positions)
    table[SAMPLES] = 1
    seeds = slots.seeds[active]
    table[SEED_LOW] = (seeds & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32)
    table[SEED_HIGH] = (seeds >> np.uint64(32)).astype(np.uint32).view(np.int32)
    table[TEMPERATURE] = slots.temperatures[active].view(np.int32)
    table[HEADER:] = slots.block_table[:lines, active]
    return table


def _wider(array: NDArray[_Number], columns: int, filler: int) -> NDArray[_Number]:
    wide = np.full((array.shape[0], columns), filler, array.dtype)
    wide[:, : array.shape[1]] = array
    return wide


def _longer(block_table: NDArray[np.int32], lines: int) -> NDArray[np.int32]:
    longer = np.zeros((2 * lines, block_table.shape[1]), np.int32)
    longer[: len(block_table)] = block_table
    return longer
