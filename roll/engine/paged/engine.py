"""The paged engine: continuous batching over a paged KV cache, with the host one or two steps ahead of the device.

A step has one decode row per sequence that samples, and prefill rows of short prompts; long prompts get a prefill pass of
their own before it. The host launches a step before it has read the previous one, so a sequence that has ended in the
meantime samples one or two tokens that are discarded. Prefixes are shared by block: the samples of a group and the turns
of a conversation compute a common prefix once. When blocks run out, the youngest sequence is preempted: it releases its
blocks, waits, and is recomputed later. It then continues with the same tokens, because the sampling noise of a token
depends only on seed and position.

Invariants: every token carries the version of the weights that sampled it. Everything that changes the result of a step
(weights, aborted requests, preempted blocks) happens while no step is in flight.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from roll.config.errors import RunError
from roll.data.routes import Routes
from roll.data.tokenlog import IntArray, share_prefix
from roll.engine.paged.batch_state import BatchState, PagedSequence, decode_inputs, prefill_inputs
from roll.engine.paged.blocks import Key, keys_of
from roll.engine.paged.kv_cache import BLOCK, PendingRoutes
from roll.engine.paged.kv_manager import KVManager
from roll.engine.paged.model_runner import AsyncOutput
from roll.engine.paged.step_inputs import LAST_SAMPLED, InputTable
from roll.engine.request import Completion, Finish, Progress, Request
from roll.engine.routes import RouteShape
from roll.engine.slot_engine import EngineStats
from roll.engine.stop_strings import hits_stop_string
from roll.model.rope import longest_sequence

PREFILL_ROWS = 8192
"""Most prompt rows in a prefill pass."""
LONG = 512
"""Prompts longer than this get a prefill pass of their own: computed row by row in a decode step, they would read the KV
cache too often."""
FEW = 256
"""Up to this many remaining rows of a long prompt are computed in a decode step nevertheless."""
_MOST_OVERTAKEN = 64
"""Most waiting sequences that may be overtaken per step."""
IN_FLIGHT = 2
"""Steps that may be launched but not read yet."""
_CACHED_CONVERSATIONS = 4
"""Per slot, the block keys of this many finished conversations are kept for their next turns."""
_NO_VERSION = -1
_NOTHING = np.empty(0, np.int32)


@dataclass(frozen=True)
class _InFlightStep:
    """A launched step: the rows that sample, and the slots and slot epochs they belong to."""

    output: AsyncOutput
    rows: NDArray[np.int64]
    slots: NDArray[np.int64]
    slot_epochs: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class _FinishedRequest:
    """A request that has finished. Its recorded routes may still be in transfer to the host."""

    sequence: PagedSequence
    finish: Finish
    routes: PendingRoutes | None

    @property
    def is_read(self) -> bool:
        return self.routes is None or self.routes.is_done


class PagedEngine:
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        *,
        max_running: int,
        kv_tokens: int = 0,
        version: int = 0,
        records_routes: bool = False,
    ) -> None:
        """`kv_tokens` is the capacity of the KV cache in tokens; 0 means enough for `max_running` requests as long as the
        longest so far, as far as memory allows. With `records_routes`, completions contain the experts that each token
        was routed to, if the model has experts."""
        self.model = model
        self.version = version
        self.context = longest_sequence(model.config)
        """Longest sequence the model supports, in tokens."""
        self._vocabulary = int(model.config.vocab_size)
        self._tokenizer = tokenizer
        self._kv_manager = KVManager(model, max_running, kv_tokens, RouteShape.of(model) if records_routes else None)
        self._slots = BatchState(max_running)
        self._waiting: deque[PagedSequence] = deque()
        self._prefilling: list[PagedSequence] = []
        """Running sequences with unfinished prefill, oldest first."""
        self._by_id: dict[str, PagedSequence] = {}
        self._cached_keys: OrderedDict[str, tuple[IntArray, list[Key]]] = OrderedDict()
        """Tokens and block keys of finished requests by request id, most recent last. The next turn of a conversation has
        the same id."""
        self._in_flight: deque[_InFlightStep] = deque()
        self._finished: deque[_FinishedRequest] = deque()
        self._generated = self._computed = self._shared = self._decoded = self._count = self._preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._slots.running or self._in_flight or self._finished)

    def stats(self) -> EngineStats:
        return EngineStats(
            waiting=len(self._waiting),
            running=self._slots.running,
            cached_tokens=self._kv_manager.used_tokens,
            generated_tokens=self._generated,
            decoded_rows=self._decoded,
            computed_prompt_tokens=self._computed,
            shared_prompt_tokens=self._shared,
            steps=self._count,
        )

    def add(self, request: Request) -> None:
        request.check(self._by_id, self.context, self._vocabulary)
        self._kv_manager.announce(request)
        sequence = PagedSequence(request)
        self._by_id[request.id] = sequence
        self._waiting.append(sequence)

    def abort(self, id: str) -> Completion | None:
        """Ends a request. Returns the tokens it has so far, or None if the engine does not have the request."""
        self.settle()
        sequence = self._by_id.get(id)
        if sequence is None:
            for ended in self._finished:  # it finished in a step that was still in flight
                if ended.sequence.request.id == id:
                    self._finished.remove(ended)
                    return self._completion(ended)
            return None
        routes = None
        if sequence.slot >= 0:
            routes = self._read_routes(sequence)
            self._leave_slot(sequence)
        else:
            self._waiting.remove(sequence)
        del self._by_id[id]
        return self._completion(_FinishedRequest(sequence, "abort", routes))

    def progress(self, reported: Mapping[str, int]) -> list[Progress]:
        """New tokens of requests. `reported` is the number of tokens already reported per request id."""
        found: list[Progress] = []
        for id, sequence in self._by_id.items():
            if sequence.slot >= 0:
                self._slots.copy_tokens(sequence)
            if len(sequence.tokens) > reported.get(id, 0):
                found.append(sequence.since(reported.get(id, 0)))
        return found

    def set_version(self, version: int) -> None:
        """Tells the engine that the values of its parameters have changed. Prefixes computed with older weights are no
        longer shared."""
        self.settle()
        if version == self.version:
            return
        self.version = version
        self._cached_keys.clear()
        self._kv_manager.evict_all()
        for sequence in self._slots.sequences:
            if sequence is not None:
                sequence.start_version(version, int(self._slots.sampled[sequence.slot]))

    def release(self) -> None:
        """Frees the KV cache until the next request. No request may be running."""
        self.settle()
        if self._slots.running:
            raise RunError(f"the engine cannot free its cache: {self._slots.running} requests are running")
        self._kv_manager.close()

    def log_probs_of(self, ids: IntArray) -> Tensor:
        """fp32 log-probs of the tokens after the first. Running requests are not affected."""
        return self._kv_manager.log_probs_of(ids)

    def step(self) -> list[Completion]:
        """Admits waiting requests, launches a step and reads an earlier one. Returns the finished requests."""
        self._count += 1
        try:
            self._admit()
            launched = False
            if self._slots.running:
                self._allocate_blocks()
                self._prefill_long()
                launched = self._launch()
            while len(self._in_flight) > (IN_FLIGHT if launched else 0):
                self._read_step()
        except BaseException:
            self._preempt_all()
            raise
        finished: list[Completion] = []
        while self._finished and (not launched or self._finished[0].is_read):
            finished.append(self._completion(self._finished.popleft()))
        return finished

    # admission

    def _admit(self) -> None:
        """Gives waiting sequences slots and blocks, oldest first, while there are both. If another sequence is about to
        compute the next block a sequence needs, the sequence waits until that pass is launched and then shares the
        block."""
        if not self._waiting:
            return
        pool = self._kv_manager.prepare(self.settle)
        coming = {key for other in self._prefilling for key in self._unfilled_keys(other)}
        overtaken: list[PagedSequence] = []
        while self._waiting and self._slots.running < self._slots.count and len(overtaken) < _MOST_OVERTAKEN:
            sequence = self._waiting[0]
            self._compute_keys(sequence)
            shared = pool.find(sequence.keys)
            if len(shared) < len(sequence.keys) and sequence.keys[len(shared)] in coming:
                overtaken.append(self._waiting.popleft())
                continue
            blocks = -(-len(sequence.known) // BLOCK)
            if not self._slots.running and blocks > pool.count - 1:
                pool, shared = self._kv_manager.reallocate(sequence.request, blocks), []
            fresh = blocks - len(shared)
            reserve = self._slots.running  # each of them may soon need a block
            if self._slots.running and fresh + pool.spare_among(shared) > pool.spare - reserve:
                break
            self._waiting.popleft()
            pool.use(shared)
            sequence.blocks = shared + pool.take(fresh)
            sequence.filled = len(shared) * BLOCK
            sequence.start_version(self.version, len(sequence.tokens))
            self._shared += sequence.filled
            self._slots.enter(sequence)
            self._prefilling.append(sequence)
            coming.update(self._unfilled_keys(sequence))
        self._waiting.extendleft(reversed(overtaken))

    def _compute_keys(self, sequence: PagedSequence) -> None:
        """Computes the block keys of a sequence, by which it finds shared prefixes. The last token gets no key: it is
        always computed, because its hidden state yields the next token."""
        if sequence.version != self.version:
            sequence.version = self.version
            sequence.known = np.concatenate([sequence.request.ids, sequence.tokens]).astype(np.int32)
            cached_tokens, keys = self._cached_keys.pop(sequence.request.id, (_NOTHING, []))
            cached_keys = keys if share_prefix(cached_tokens, sequence.known[:-1], len(cached_tokens)) else []
            sequence.keys = keys_of(sequence.known[:-1], BLOCK, self.version, cached_keys)

    def _unfilled_keys(self, sequence: PagedSequence) -> list[Key]:
        return sequence.keys[sequence.filled // BLOCK :] if sequence.version == self.version else []

    # launching

    def _prefill_long(self) -> None:
        """A prefill pass for long prompts only."""
        budget = PREFILL_ROWS
        parts: list[InputTable] = []
        spans: list[tuple[int, int]] = []
        cache_positions: list[NDArray[np.int64]] = []
        for sequence in filter(_needs_prefill_pass, self._prefilling):
            count = min(budget, sequence.remaining_prefill)
            keys = np.arange(sequence.filled + count)
            parts.append(self._prefill_rows(sequence, count, lines=0))
            spans.append((count, len(keys)))
            cache_positions.append(self._slots.cache_positions(np.full(len(keys), sequence.slot), keys))
            budget -= count
            if not budget:
                break
        if parts:
            self._kv_manager.runner.prefill(np.concatenate(parts, axis=1), spans, np.concatenate(cache_positions))

    def _prefill_rows(self, sequence: PagedSequence, count: int, lines: int) -> InputTable:
        """The inputs of the next `count` rows of a prompt, which count as computed from now on."""
        table = prefill_inputs(self._slots, sequence, count, lines)
        registered = sequence.filled // BLOCK
        sequence.filled += count
        self._computed += count
        self._register_blocks(sequence, registered, sequence.filled // BLOCK)
        return table

    def _register_blocks(self, sequence: PagedSequence, start: int, end: int) -> None:
        """Registers the keys of these blocks so that other sequences can share them, unless the weights have changed
        since the sequence started."""
        if sequence.version == self.version:
            for block, key in zip(sequence.blocks[start:end], sequence.keys[start:end], strict=False):
                self._kv_manager.pool.register(block, key)

    def _launch(self) -> bool:
        """Launches a step: one row per sequence that samples, and as many prompt rows as fit. False if there was nothing
        to launch."""
        slots = self._slots
        lines = int(slots.block_counts.max())
        budget, tile = self._kv_manager.runner.most_prompt_rows, self._kv_manager.runner.tile
        parts: list[InputTable] = []
        for sequence in [each for each in self._prefilling if not _needs_prefill_pass(each)]:
            count = min(budget, sequence.remaining_prefill)  # its last token is among the rows that sample
            if count > 0:
                parts.append(self._prefill_rows(sequence, count, lines))
                budget -= -(-count // tile) * tile
            if sequence.remaining_prefill:
                break
            slots.is_sampling[sequence.slot] = True
            self._prefilling.remove(sequence)
        active = np.flatnonzero(slots.is_sampling & (slots.launched < slots.limit))
        if not len(active) and not parts:
            return False
        truncating = np.flatnonzero(slots.truncates[active]).tolist()
        truncated = {row: self._sequence(active[row]).request.sampling for row in truncating}
        output = self._kv_manager.runner.sample(decode_inputs(slots, active, lines), parts, truncated)
        self._in_flight.append(_InFlightStep(output, np.arange(len(active)), active, slots.slot_epoch[active]))
        slots.launched[active] += 1
        slots.given[active] = LAST_SAMPLED
        self._decoded += len(active)
        return True

    def _allocate_blocks(self) -> None:
        """Allocates the next block to every sequence whose next row needs one. If there are too few spare blocks, the
        youngest sequence is preempted."""
        while True:
            slots = self._slots
            next_rows = slots.is_sampling & (slots.launched < slots.limit)
            short = np.flatnonzero(next_rows & (slots.positions // BLOCK >= slots.block_counts))
            if len(short) <= self._kv_manager.pool.spare:
                break
            if self._in_flight:
                self.settle()  # some sequences may have ended
            else:
                self._preempt(keeps_routes=True)
        for slot in short:
            slots.add_blocks(self._sequence(slot), self._kv_manager.pool.take(1))

    def _preempt(self, keeps_routes: bool = False) -> None:
        """Preempts the youngest running sequence: it becomes the first of the waiting. With `keeps_routes`, the routes
        its tokens were sampled with are kept, because recomputing the sequence may route them differently."""
        running = [sequence for sequence in self._slots.sequences if sequence is not None]
        youngest = max(running, key=lambda sequence: self._slots.slot_epoch[sequence.slot])
        if keeps_routes and (routes := self._read_routes(youngest)) is not None:
            youngest.routes.append(self._on_host(routes))
        self._leave_slot(youngest)
        youngest.version = _NO_VERSION  # its block keys must be recomputed, because it has more tokens now
        self._waiting.appendleft(youngest)
        self._preemptions += 1

    def _preempt_all(self) -> None:
        """After a failed step the contents of the cache are unknown: all running sequences are preempted, with the tokens
        they have."""
        self._in_flight.clear()
        while self._slots.running:
            self._preempt()
        self._prefilling.clear()
        self._cached_keys.clear()
        self._kv_manager.evict_all()

    # reading results

    def settle(self) -> None:
        """Reads all steps in flight, so that requests have all tokens sampled so far."""
        while self._in_flight:
            self._read_step()

    def _read_step(self) -> None:
        """Reads the oldest step in flight."""
        flight = self._in_flight.popleft()
        tokens, log_probs = flight.output.read()
        slots = self._slots
        here = slots.slot_epoch[flight.slots] == flight.slot_epochs
        rows, where = flight.rows[here], flight.slots[here]
        if not len(where):
            return
        if (tokens[rows] < 0).any():
            raise RunError("the model's logits are not numbers: the weights are damaged, or the temperature is near 0")
        ended = slots.record(where, tokens[rows], log_probs[rows])
        self._generated += len(where)
        for slot in where[slots.has_strings[where]]:
            request, count = self._sequence(slot).request, int(slots.sampled[slot])
            if hits_stop_string(self._tokenizer, slots.tokens[slot, :count], request.sampling.stop, request.response_ids):
                self._finish(self._sequence(slot), "stop")
        for slot in where[ended & (slots.slot_epoch[where] == flight.slot_epochs[here])]:
            self._finish(self._sequence(slot), slots.finish_of(int(slot)))

    def _finish(self, sequence: PagedSequence, finish: Finish) -> None:
        routes = self._read_routes(sequence)
        self._leave_slot(sequence)
        del self._by_id[sequence.request.id]
        self._finished.append(_FinishedRequest(sequence, finish, routes))

    def _read_routes(self, sequence: PagedSequence) -> PendingRoutes | None:
        """Starts reading the routes of a running sequence that are not read yet, if its request asks for routes."""
        start, slot = sequence.routes_from, sequence.slot
        if self._kv_manager.recorded is None or start is None:
            return None
        end = sequence.filled
        if sequence.remaining_prefill <= 0:
            end = len(sequence.request.ids) + int(self._slots.sampled[slot]) - 1
        positions = np.arange(min(start, end), end)
        return self._kv_manager.read_routes(self._slots.cache_positions(np.full(len(positions), slot), positions))

    def _on_host(self, pending: PendingRoutes) -> Routes:
        assert self._kv_manager.recorded is not None
        return self._kv_manager.recorded.host(pending.read())

    def _completion(self, ended: _FinishedRequest) -> Completion:
        if ended.routes is not None:
            ended.sequence.routes.append(self._on_host(ended.routes))
        return ended.sequence.completion(ended.finish)

    def _leave_slot(self, sequence: PagedSequence) -> None:
        """Removes a running sequence from its slot. Its blocks stay in the pool for prefix sharing until they are
        reallocated."""
        filled = sequence.remaining_prefill <= 0
        self._slots.remove(sequence)
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
        if filled and sequence.version == self.version:
            tokens = np.concatenate([sequence.request.ids, sequence.tokens])[:-1]  # the last token may not be computed
            registered, sequence.keys = len(sequence.keys), keys_of(tokens, BLOCK, self.version, sequence.keys)
            self._register_blocks(sequence, registered, len(sequence.keys))
            self._cached_keys[sequence.request.id] = (tokens, sequence.keys)
            if len(self._cached_keys) > _CACHED_CONVERSATIONS * self._slots.count:
                self._cached_keys.popitem(last=False)
        self._kv_manager.pool.release(sequence.blocks)
        sequence.blocks = []

    def _sequence(self, slot: int | np.integer[Any]) -> PagedSequence:
        sequence = self._slots.sequences[int(slot)]
        assert sequence is not None
        return sequence


def _needs_prefill_pass(sequence: PagedSequence) -> bool:
    return len(sequence.known) > LONG and sequence.remaining_prefill > FEW
