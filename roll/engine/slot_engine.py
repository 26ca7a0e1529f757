"""The slot engine: continuous batching over a contiguous KV cache, with the parameters of a model that is in this
process.

A step admits waiting requests, prefills their prompts, decodes one token for every running request and returns the
finished requests. Requests enter and leave one by one. Nothing is computed twice: requests with identical tokens so far
share one sequence until they sample different tokens, and a prefix that a running or recently finished sequence has in
the KV cache is copied from its slot.

Invariants: every token carries the version of the weights that sampled it. With `exact`, every forward pass has the same
number of rows and attention is computed per sequence, so a request's tokens and log-probs have the same bits whatever
else is running; response tokens that a request brings along are recomputed token by token, as when they were sampled, so
that it also continues with the same bits. The KV cache never exceeds its token limit: if requests are long, fewer run at
once and the others wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from roll.config.errors import RunError
from roll.data.tokenlog import IntArray, share_prefix
from roll.engine.cache import CachePlan, DecodeRows, PrefillChunk, SlotCache
from roll.engine.cpu_forward import column_logits, forward_columns, supported
from roll.engine.kv_sizing import CacheShape, FreeBytes, KVBudget, SlotSizing
from roll.engine.memory import free_bytes
from roll.engine.prefix_index import key_of
from roll.engine.request import Completion, Finish, Progress, Request
from roll.engine.routes import RouteRecorder, RouteShape
from roll.engine.sampling import sample_tokens
from roll.engine.shared_sequence import SequenceMember, SharedSequence
from roll.engine.slot_allocator import SlotAllocator
from roll.engine.stop_strings import hits_stop_string
from roll.model.attention import forward_rows, logits_of
from roll.model.experts import with_experts
from roll.model.rope import longest_sequence

EXACT_ROWS = 16
"""Rows of every forward pass with `exact`. The number is fixed because the bits of a linear layer's output depend on
it."""
PROMPT_ROWS = 256
"""Without `exact`, target number of rows per step: prompts fill the rows that decoding leaves free (chunked prefill).
This bounds how long a long prompt delays running sequences."""
SHORTEST_SHARED = 8
"""A sequence does not wait for another to compute a shared prefix shorter than this; it computes the prefix itself."""


@dataclass(frozen=True)
class EngineStats:
    waiting: int
    running: int
    cached_tokens: int
    generated_tokens: int
    decoded_rows: int
    """Tokens computed one per sequence by decode. Lower than `generated_tokens` if several requests shared a sequence."""
    computed_prompt_tokens: int
    shared_prompt_tokens: int
    steps: int


class SlotEngine:
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        *,
        max_running: int,
        exact: bool = False,
        kv_tokens: int = 0,
        version: int = 0,
        records_routes: bool = False,
        free_bytes: FreeBytes = free_bytes,
    ) -> None:
        """`kv_tokens` limits the tokens in the KV cache; 0 takes a share of the free memory, as reported by `free_bytes`.
        If requests are too long for that limit, fewer than `max_running` run at once and the others wait. With
        `records_routes`, completions contain the experts that each token was routed to, if the model has experts."""
        self.model = model
        self.version = version
        self._tokenizer = tokenizer
        self._max_running = max_running
        self._exact = exact
        self._columns = not exact and supported(model)
        # The number of rows per expert depends on the other sequences. Under `exact`, each row therefore has its own
        # expert products.
        self._computed_by = with_experts(model, "batched_mm") if exact else model
        self._vocab = int(model.config.vocab_size)
        self._device = next(model.parameters()).device
        self._recorder = RouteRecorder(self._computed_by)
        recorded = RouteShape.of(model) if records_routes else None
        self._cache = SlotCache(model.config, next(model.parameters()).dtype, self._device, recorded)
        self._limit = KVBudget(kv_tokens, self._cache.bytes_per_token, self._device, free_bytes)
        self._sizing = SlotSizing(max_running, self.context, len(self._cache.layers))
        self._slots = SlotAllocator(self._cache, EXACT_ROWS if exact else 1)
        self._waiting: deque[Request] = deque()
        self._blocked: tuple[str, int] | None = None
        """The first waiting request and the number of running ones, if that request cannot get a slot while that many
        run."""
        self._prefilling: list[SharedSequence] = []  # sequences with unfinished prefill, oldest first
        self._sampling: dict[SharedSequence, None] = {}
        """The running sequences that have a token of their response."""
        self._extended: list[SharedSequence] = []
        """The sequences that got a token in this step."""
        self._ids: set[str] = set()
        self._generated = self._computed = self._shared = self._decoded = self._steps = 0

    @cached_property
    def context(self) -> int:
        """Longest sequence the model supports, in tokens."""
        return longest_sequence(self.model.config)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._slots.running)

    def stats(self) -> EngineStats:
        return EngineStats(
            waiting=len(self._waiting),
            running=sum(len(sequence.members) for sequence in self._slots.running),
            cached_tokens=sum(sequence.cached for sequence in self._slots.running),
            generated_tokens=self._generated,
            decoded_rows=self._decoded,
            computed_prompt_tokens=self._computed,
            shared_prompt_tokens=self._shared,
            steps=self._steps,
        )

    def add(self, request: Request) -> None:
        request.check(self._ids, self.context, self._vocab)
        if request.tokens > self._cache.shape.tokens:  # otherwise the current cache can hold it
            self._limit.check(request, self._limit.tokens(self._cache.shape.tokens))
        self._ids.add(request.id)
        self._waiting.append(request)

    def abort(self, id: str) -> Completion | None:
        """Ends a request. Returns the tokens it has so far, or None if the engine does not have the request."""
        for request in self._waiting:
            if request.id == id:
                self._waiting.remove(request)
                self._ids.remove(id)
                return SharedSequence(request.ids, [], self.version).completion(SequenceMember(request), "abort")
        for sequence in self._slots.running:
            for member in sequence.members:
                if member.request.id == id:
                    completion = self._completion(sequence, member, "abort")
                    self._remove(sequence, member)
                    return completion
        return None

    def progress(self, reported: Mapping[str, int]) -> list[Progress]:
        """New tokens of running requests. `reported` is the number of tokens already reported per request id."""
        found: list[Progress] = []
        for sequence in self._slots.running:
            for member in sequence.members:
                start = reported.get(member.request.id, 0)
                if sequence.sampled > start:
                    found.append(sequence.since(member, start))
        return found

    def set_version(self, version: int) -> None:
        """Tells the engine that the values of its parameters have changed. Prefixes computed with older weights are no
        longer shared."""
        self.version = version
        self._slots.evict_all()
        for sequence in self._slots.running:
            if not sequence.cached:  # the KV cache has nothing of it from the old weights
                sequence.version = version

    def settle(self) -> None:
        """Does nothing: every step is complete when `step` returns."""

    def release(self) -> None:
        """Frees the KV cache until the next request. No request may be running."""
        if self._slots.running:
            raise RunError(f"the engine cannot free its cache: {self.stats().running} requests are running")
        self._slots.evict_all()
        self._cache.release()

    @torch.inference_mode()
    def log_probs_of(self, ids: IntArray) -> Tensor:
        """fp32 log-probs of the tokens after the first, computed as prefill is, in a separate cache. Running requests are
        not affected."""
        cache = SlotCache(self.model.config, next(self.model.parameters()).dtype, self._device)
        cache.reshape(CacheShape(1, len(ids)))
        rows = EXACT_ROWS if self._exact else PROMPT_ROWS
        parts: list[Tensor] = []
        for start in range(0, len(ids), rows):
            chunk = ids[start : start + rows]
            plan = CachePlan(cache, [PrefillChunk(0, start, len(chunk))], [], self._exact)
            hidden = self._forward(chunk, np.arange(start, start + len(chunk)), plan)
            parts.append(torch.log_softmax(self._logits(hidden), dim=-1)[: len(chunk)])
        targets = torch.from_numpy(ids[1:].astype(np.int64)).to(self._device)
        return torch.cat(parts)[:-1].gather(1, targets[:, None])[:, 0].cpu()

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Admits waiting requests, then computes one token for every request whose prefill is complete. Returns the
        finished ones."""
        self._steps += 1
        self._admit()
        if self._exact:
            self._compute_in_tiles()
        else:
            self._compute_mixed()
        self._sample_rows()
        return self._collect()

    def _admit(self) -> None:
        """Admits as many waiting requests as there are slots for, growing the cache if possible. Requests with equal
        prompts share one sequence."""
        shape, count = self._needed_cache() if self._waiting else (self._cache.shape, 0)
        fresh: dict[tuple[bytes, tuple[int, ...]], SharedSequence] = {}
        for _ in range(count):
            request = self._waiting.popleft()
            prompt, response = (
                (request.prompt, tuple(request.response_ids.tolist())) if self._exact else (request.ids, ())
            )
            key = key_of(prompt), response
            sequence = fresh.get(key)
            if sequence is None:
                sequence = fresh[key] = SharedSequence(prompt, [], self.version, forced_ids=response)
            else:
                self._shared += len(request.ids)
            sequence.members.append(SequenceMember(request))
        self._shared += self._slots.admit(list(fresh.values()), shape)
        self._prefilling += fresh.values()

    def _needed_cache(self) -> tuple[CacheShape, int]:
        """The cache shape to use now, and how many waiting requests, oldest first, get a slot in it. Every request counts
        as one slot, even if it shares a sequence: it may sample a different token and then needs its own."""
        current, prefixes = self._cache.shape, self._slots.cached_prefix_count
        count_running = len(self._ids) - len(self._waiting)
        if self._blocked == (self._waiting[0].id, count_running):
            return current, 0
        waiting = [request.tokens for request in islice(self._waiting, self._max_running - count_running)]
        required = min(count_running + len(waiting) + prefixes, self._max_running)
        if required <= current.slots and max(waiting, default=0) <= current.positions:
            return current, len(waiting)
        most = self._limit.tokens(current.tokens)
        running = [member.request.tokens for sequence in self._slots.running for member in sequence.members]
        shape, count = self._sizing.choose(current, running, waiting, prefixes, most)
        self._blocked = None if count else (self._waiting[0].id, count_running)
        if shape != current and self._sizing.peak(current, shape) > most:
            assert not running, "running sequences cannot be moved"
            self._slots.evict_all()
            self._cache.release()
        return shape, count

    def _decoding(self) -> list[DecodeRows]:
        """One decode row for every sequence that has sampled a token whose hidden state is not computed yet."""
        waiting = [sequence for sequence in self._sampling if sequence.hidden is None]
        return [DecodeRows(each.slot, each.length) for each in sorted(waiting, key=_slot_of)]

    def _compute_mixed(self) -> None:
        """Prefills as many prompt tokens as the step's budget allows; the first pass also contains the decode rows.
        Further passes are needed only for prompts that share a prefix with a prompt of an earlier pass."""
        decoding = self._decoding()
        budget = max(PROMPT_ROWS - len(decoding), PROMPT_ROWS // 4)
        while (chunks := self._chunks(budget)) or decoding:
            self._compute(chunks, decoding)
            budget -= sum(chunk.rows for chunk in chunks)
            decoding = []

    def _chunks(self, budget: int) -> list[PrefillChunk]:
        """Prompt rows for the next pass, oldest request first. If another sequence in this pass computes a shared prefix,
        the sequence waits for the next pass and copies the prefix then."""
        chunks: list[PrefillChunk] = []
        started: list[SharedSequence] = []
        for sequence in self._prefilling:
            if not budget:
                break
            if sequence.hidden is not None:
                continue
            self._shared += self._slots.share(sequence)
            worth = max(sequence.cached + 1, SHORTEST_SHARED)
            if sequence.hidden is None and not any(share_prefix(each.prompt, sequence.prompt, worth) for each in started):
                rows = min(budget, len(sequence.prompt) - sequence.cached)
                chunks.append(PrefillChunk(sequence.slot, sequence.cached, rows))
                started.append(sequence)
                budget -= rows
        return chunks

    def _compute_in_tiles(self) -> None:
        """As `_compute_mixed`, in passes of a fixed number of rows: each prompt in full, in chunks counted from its
        start, then the decode rows."""
        for sequence in self._slots.running:
            if not sequence.ids and sequence.hidden is None:
                self._shared += self._slots.share(sequence)
                for start in range(sequence.cached, len(sequence.prompt), EXACT_ROWS):
                    rows = min(EXACT_ROWS, len(sequence.prompt) - start)
                    self._compute([PrefillChunk(sequence.slot, start, rows)], [])
        decoding = self._decoding()
        for first in range(0, len(decoding), EXACT_ROWS):
            self._compute([], decoding[first : first + EXACT_ROWS])

    def _compute(self, chunks: list[PrefillChunk], decoding: list[DecodeRows]) -> None:
        """One forward pass: prompt chunks, and one row per decoding slot."""
        if not chunks and not decoding:
            return
        running = self._slots.running
        spans = [(chunk.slot, chunk.start, chunk.start + chunk.rows) for chunk in chunks]
        ids = [running[slot].prompt[start:end] for slot, start, end in spans]
        ids.append(np.array([running[each.slot].ids[-1] for each in decoding], np.int32))
        positions = [np.arange(start, end) for _, start, end in spans]
        positions.append(np.array([each.length - 1 for each in decoding], np.int64))
        plan = CachePlan(self._cache, chunks, decoding, self._exact)
        hidden = self._forward(np.concatenate(ids), np.concatenate(positions), plan)
        row = 0
        for slot, start, end in spans:
            row += end - start
            sequence = running[slot]
            sequence.cached = end
            if end == len(sequence.prompt):
                sequence.hidden = sequence.prompt_hidden = hidden[row - 1].clone()
            self._slots.computed(sequence)
        for number, each in enumerate(decoding, row):
            running[each.slot].hidden = hidden[number]
            running[each.slot].cached = each.length
        self._computed += row
        self._decoded += len(decoding)

    def _forward(self, ids: NDArray[Any], positions: NDArray[Any], plan: CachePlan) -> Tensor:
        """Hidden states of the rows. Under `exact`, padding fills the pass up to its fixed number of rows."""
        padding = EXACT_ROWS - len(ids) if self._exact else 0
        rows = torch.from_numpy(np.pad(ids.astype(np.int64), (0, padding))).to(self._device)
        where = torch.from_numpy(np.pad(positions.astype(np.int64), (0, padding))).to(self._device)
        if plan.records:
            hidden, routes = self._recorder.record(lambda: forward_rows(self._computed_by, rows, where, plan))
            plan.store_routes(routes)
            return hidden
        return (forward_columns if self._columns else forward_rows)(self._computed_by, rows, where, plan)

    def _logits(self, hidden: Tensor) -> Tensor:
        return (column_logits if self._columns else logits_of)(self.model, hidden)

    def _sample_rows(self) -> None:
        """Samples a token for every request with a hidden state. A sequence splits if its requests sampled different
        tokens."""
        computed = [each for each in (*self._sampling, *self._prefilling) if each.hidden is not None]
        computed.sort(key=_slot_of)
        self._prefilling = [sequence for sequence in self._prefilling if sequence.hidden is None]
        for sequence in computed:
            if sequence.repeats:
                self._append(sequence, sequence.forced_ids[len(sequence.ids)])
        ready = [(sequence.slot, sequence.hidden) for sequence in computed if sequence.hidden is not None]
        rows = EXACT_ROWS if self._exact else max(len(ready), 1)
        for first in range(0, len(ready), rows):
            self._sample([slot for slot, _ in ready[first : first + rows]], [h for _, h in ready[first : first + rows]])

    def _sample(self, slots: list[int], states: list[Tensor]) -> None:
        running, hidden = self._slots.running, torch.stack(states)
        if self._exact:
            hidden = torch.nn.functional.pad(hidden, (0, 0, 0, EXACT_ROWS - len(slots)))
        logits = self._logits(hidden)
        members = [(row, slot, member) for row, slot in enumerate(slots) for member in running[slot].members]
        tokens, logprobs = sample_tokens(
            logits,
            [row for row, _, _ in members],
            [member.request.sampling for _, _, member in members],
            [running[slot].length for _, slot, _ in members],
        )
        chosen: dict[int, dict[int, list[SequenceMember]]] = {slot: {} for slot in slots}
        for (_, slot, member), token, logprob in zip(members, tokens, logprobs, strict=True):
            member.logprobs.append(logprob)
            chosen[slot].setdefault(token, []).append(member)
        for slot, branches in chosen.items():
            self._extend(slot, branches)
        self._generated += len(members)

    def _extend(self, slot: int, branches: dict[int, list[SequenceMember]]) -> None:
        """Appends the sampled tokens: the first to the sequence itself, every other one to a copy of it in a new slot."""
        sequence = self._slots.running[slot]
        sequence.hidden = None
        for token, members in list(branches.items())[1:]:
            ids, versions = [*sequence.ids, token], [*sequence.versions, self.version]
            fork = replace(sequence, members=members, ids=ids, versions=versions)
            self._slots.fork(slot, fork)
            self._sampling[fork] = None
            self._extended.append(fork)
        token, members = next(iter(branches.items()))
        sequence.members = members
        self._append(sequence, token)

    def _append(self, sequence: SharedSequence, token: int) -> None:
        sequence.hidden = None
        sequence.ids.append(token)
        sequence.versions.append(self.version)
        self._sampling[sequence] = None
        self._extended.append(sequence)

    def _collect(self) -> list[Completion]:
        """The requests whose last token ends them, in the order of their slots."""
        finished: list[Completion] = []
        extended, self._extended = self._extended, []
        for sequence in sorted(extended, key=_slot_of, reverse=True):
            for member in list(sequence.members) if sequence.sampled else []:
                finish = self._finish_of(sequence, member)
                if finish is not None:
                    finished.append(self._completion(sequence, member, finish))
                    self._remove(sequence, member)
        return finished[::-1]

    def _completion(self, sequence: SharedSequence, member: SequenceMember, finish: Finish) -> Completion:
        slot, start = sequence.slot, member.request.routes_from
        routes = None if start is None else self._cache.routes_of(slot, min(start, sequence.cached), sequence.cached)
        return sequence.completion(member, finish, routes)

    def _finish_of(self, sequence: SharedSequence, member: SequenceMember) -> Finish | None:
        sampling, response = member.request.sampling, () if sequence.forced_ids else member.request.response_ids
        if sequence.ids[-1] in sampling.stop_ids or hits_stop_string(
            self._tokenizer, sequence.ids, sampling.stop, response
        ):
            return "stop"
        return "length" if sequence.sampled >= sampling.max_new_tokens else None

    @torch.inference_mode()
    def _remove(self, sequence: SharedSequence, member: SequenceMember) -> None:
        """Removes a request. A sequence without requests ends; its slot is kept for prefix reuse if it was computed with
        the current weights only."""
        self._ids.remove(member.request.id)
        sequence.members.remove(member)
        if not sequence.members:
            self._sampling.pop(sequence, None)
            if sequence.prompt_hidden is None:
                self._prefilling.remove(sequence)
            self._slots.retire(sequence, cache_prefix=sequence.version == self.version)


def _slot_of(sequence: SharedSequence) -> int:
    return sequence.slot
