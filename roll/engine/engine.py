"""The embedded engine: continuous batching over the parameters of a model that lives in this process.

A step admits waiting requests, computes their prompts, decodes one token of every running request and returns what
finished. Requests enter and leave one by one; a prompt, or the beginning of one, that a running sequence already has is
copied from its slot instead of computed.

What always holds: a token carries the version of the weights that drew it. With `exact`, every forward pass has the same
number of rows and every sequence attends by itself, so that a request's tokens and log-probs are the same bits whatever
runs beside it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from roll.config.errors import RunError
from roll.data.tokenlog import IntArray
from roll.engine.cache import CachePlan, Chunk, SlotCache
from roll.engine.request import Completion, Finish, Request
from roll.engine.sampling import draw
from roll.model.attention import forward_rows, logits_of

EXACT_ROWS = 16
"""Rows of every forward pass under `exact`: fixed, because a linear layer's bits depend on their number."""
PROMPT_ROWS = 512
"""Most rows of prompts in one forward pass otherwise."""
SHORTEST_SHARED = 8
"""A shared beginning shorter than this is computed again rather than waited for."""


@dataclass
class _Running:
    """A request in a slot: its position in the engine's list is its slot."""

    request: Request
    cached: int = 0
    hidden: Tensor | None = None
    """The hidden state the next token is drawn from; None until the prompt is computed."""
    prompt_hidden: Tensor | None = None
    version: int = 0
    """Of the weights that computed the cached keys and values."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def prompt(self) -> IntArray:
        return self.request.ids

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.ids)

    def completion(self, finish: Finish) -> Completion:
        return Completion(
            self.request.id,
            np.array(self.ids, np.int32),
            np.array(self.logprobs, np.float32),
            np.array(self.versions, np.int32),
            finish,
        )


@dataclass(frozen=True)
class EngineStats:
    waiting: int
    running: int
    cached_tokens: int
    generated_tokens: int
    computed_prompt_tokens: int
    shared_prompt_tokens: int
    steps: int


class Engine:
    def __init__(
        self, model: PreTrainedModel, tokenizer: Tokenizer, *, max_running: int, exact: bool = False, version: int = 0
    ) -> None:
        self.model = model
        self.version = version
        self._tokenizer = tokenizer
        self._max_running = max_running
        self._exact = exact
        self._device = next(model.parameters()).device
        self._cache = SlotCache(model.config, max_running, next(model.parameters()).dtype, self._device)
        self._waiting: deque[Request] = deque()
        self._running: list[_Running] = []
        self._generated = self._computed = self._shared = self._steps = 0

    @property
    def context(self) -> int:
        """Longest sequence the model was made for, in tokens."""
        return int(self.model.config.max_position_embeddings)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def stats(self) -> EngineStats:
        cached = sum(r.cached for r in self._running)
        return EngineStats(
            len(self._waiting), len(self._running), cached, self._generated, self._computed, self._shared, self._steps
        )

    def add(self, request: Request) -> None:
        wanted = len(request.ids) + request.sampling.max_new_tokens
        if not len(request.ids):
            raise ValueError(f"request {request.id!r} has no tokens to continue")
        if wanted > self.context:
            raise ValueError(
                f"request {request.id!r} may need {wanted} tokens ({len(request.ids)} of prompt and "
                f"{request.sampling.max_new_tokens} new), but the model's context is {self.context}"
            )
        self._waiting.append(request)

    def abort(self, id: str) -> Completion | None:
        """Ends a request; returns what it has so far, None if it is not here."""
        for request in self._waiting:
            if request.id == id:
                self._waiting.remove(request)
                return _Running(request).completion("abort")
        for slot, running in enumerate(self._running):
            if running.request.id == id:
                self._leave(slot)
                return running.completion("abort")
        return None

    def set_version(self, version: int) -> None:
        """Tells the engine that the parameters it uses have changed. Prefixes of older versions are not shared on."""
        self.version = version

    def release(self) -> None:
        """Frees the cache's memory until the next request; nothing may be running."""
        if self._running:
            raise RunError(f"the engine cannot free its cache: {len(self._running)} requests are running")
        self._cache.release()

    @torch.inference_mode()
    def log_probs_of(self, ids: IntArray) -> Tensor:
        """fp32 log-probs of a sequence's tokens after the first, computed as a prompt is; nothing running is touched."""
        cache = SlotCache(self.model.config, 1, next(self.model.parameters()).dtype, self._device)
        cache.reserve(len(ids))
        rows = EXACT_ROWS if self._exact else PROMPT_ROWS
        parts: list[Tensor] = []
        for start in range(0, len(ids), rows):
            chunk = ids[start : start + rows]
            plan = CachePlan(cache, [Chunk(0, start, len(chunk))], [], self._exact)
            hidden = self._forward(chunk, np.arange(start, start + len(chunk)), plan)
            parts.append(torch.log_softmax(logits_of(self.model, hidden), dim=-1)[: len(chunk)])
        targets = torch.from_numpy(ids[1:].astype(np.int64)).to(self._device)
        return torch.cat(parts)[:-1].gather(1, targets[:, None])[:, 0].cpu()

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """One token for every running request, after admitting what fits. Returns what finished."""
        self._steps += 1
        self._admit()
        if not self._running:
            return []
        self._decode()
        self._sample()
        return self._collect()

    def _admit(self) -> None:
        """Gives waiting requests slots and computes their prompts, in waves: a request whose beginning is being
        computed by another one of this wave waits for the next, and copies it then."""
        first_new = len(self._running)
        room = self._max_running - first_new
        fresh = [_Running(self._waiting.popleft()) for _ in range(min(room, len(self._waiting)))]
        if not fresh:
            return
        longest = max(len(r.prompt) + r.request.sampling.max_new_tokens for r in fresh)
        self._cache.reserve(longest)
        self._running.extend(fresh)
        pending = list(range(first_new, len(self._running)))
        while pending:
            wave: list[int] = []
            later: list[int] = []
            for slot in pending:
                donor, shared = self._best_donor(slot)
                soon = max((_common(self._running[s].prompt, self._running[slot].prompt) for s in wave), default=0)
                if soon >= max(shared + 1, SHORTEST_SHARED):
                    later.append(slot)
                    continue
                self._share(donor, slot, shared)
                if self._running[slot].hidden is None:
                    wave.append(slot)
            self._prefill(wave)
            pending = later

    def _best_donor(self, slot: int) -> tuple[int, int]:
        """The slot with the longest beginning in common, and how many positions may be copied from it."""
        wanted = self._running[slot].prompt
        best, most = slot, 0
        for other, donor in enumerate(self._running):
            if other == slot or donor.version != self.version or not donor.cached:
                continue
            same = _common(donor.prompt[: donor.cached], wanted)
            whole = same == len(wanted) == len(donor.prompt) and donor.prompt_hidden is not None
            if not whole:
                same = min(same, len(wanted) - 1)  # the last token must be computed for its hidden state
                if self._exact:
                    same -= same % EXACT_ROWS  # chunks are counted from the request's own start
            if same > most:
                best, most = other, same
        return best, most

    def _share(self, donor: int, slot: int, shared: int) -> None:
        target = self._running[slot]
        target.version = self.version
        if shared == 0:
            return
        self._cache.copy(donor, slot, shared)
        self._shared += shared
        target.cached = shared
        if shared == len(target.prompt):
            target.hidden = target.prompt_hidden = self._running[donor].prompt_hidden

    def _prefill(self, slots: list[int]) -> None:
        """Computes the prompts of these slots, as many rows at once as allowed, each from where its cache ends."""
        todo = deque(slots)
        limit = EXACT_ROWS if self._exact else PROMPT_ROWS
        while todo:
            chunks: list[Chunk] = []
            room = limit
            while todo and room and not (self._exact and chunks):
                slot = todo[0]
                running = self._running[slot]
                planned = sum(c.rows for c in chunks if c.slot == slot)
                start = running.cached + planned
                rows = min(room, len(running.prompt) - start)
                chunks.append(Chunk(slot, start, rows))
                room -= rows
                if start + rows == len(running.prompt):
                    todo.popleft()
            self._compute(chunks)

    def _compute(self, chunks: list[Chunk]) -> None:
        ids = np.concatenate([self._running[c.slot].prompt[c.start : c.start + c.rows] for c in chunks])
        positions = np.concatenate([np.arange(c.start, c.start + c.rows) for c in chunks])
        hidden = self._forward(ids, positions, CachePlan(self._cache, chunks, [], self._exact))
        self._computed += len(ids)
        row = 0
        for chunk in chunks:
            running = self._running[chunk.slot]
            row += chunk.rows
            running.cached = chunk.start + chunk.rows
            if running.cached == len(running.prompt):
                running.hidden = running.prompt_hidden = hidden[row - 1].clone()

    def _decode(self) -> None:
        """Computes the last token of every running request that has drawn one since its hidden state was made.

        Requests still holding a hidden state came in this step; they are the last slots, because slots have no holes.
        """
        count = sum(r.hidden is None for r in self._running)
        assert all(r.hidden is None for r in self._running[:count])
        rows = EXACT_ROWS if self._exact else count
        for first in range(0, count, max(rows, 1)):
            batch = self._running[first : min(first + rows, count)]
            ids = np.array([r.ids[-1] for r in batch], np.int64)
            lengths = [r.length for r in batch]
            plan = CachePlan(self._cache, [], lengths, self._exact, first)
            hidden = self._forward(ids, np.array(lengths) - 1, plan)
            for row, running in enumerate(batch):
                running.hidden = hidden[row]
                running.cached = running.length

    def _forward(self, ids: NDArray[Any], positions: NDArray[Any], plan: CachePlan) -> Tensor:
        """Hidden states of the rows; under `exact` the pass is filled up to its fixed number of rows."""
        padding = EXACT_ROWS - len(ids) if self._exact else 0
        rows = torch.from_numpy(np.pad(ids.astype(np.int64), (0, padding))).to(self._device)
        where = torch.from_numpy(np.pad(positions.astype(np.int64), (0, padding))).to(self._device)
        return forward_rows(self.model, rows, where, plan)

    def _sample(self) -> None:
        rows = EXACT_ROWS if self._exact else len(self._running)
        for first in range(0, len(self._running), rows):
            batch = self._running[first : first + rows]
            hidden = torch.stack([r.hidden for r in batch if r.hidden is not None])
            if self._exact:
                hidden = torch.nn.functional.pad(hidden, (0, 0, 0, rows - len(batch)))
            logits = logits_of(self.model, hidden)[: len(batch)]
            tokens, logprobs = draw(logits, [r.request.sampling for r in batch], [r.length for r in batch])
            for running, token, logprob in zip(batch, tokens.tolist(), logprobs.tolist(), strict=True):
                running.ids.append(token)
                running.logprobs.append(logprob)
                running.versions.append(self.version)
                running.hidden = None
            self._generated += len(batch)

    def _collect(self) -> list[Completion]:
        finished: list[Completion] = []
        for slot in reversed(range(len(self._running))):
            finish = self._finish_of(self._running[slot])
            if finish is not None:
                finished.append(self._running[slot].completion(finish))
                self._leave(slot)
        return finished[::-1]

    def _finish_of(self, running: _Running) -> Finish | None:
        sampling = running.request.sampling
        if running.ids[-1] in sampling.stop_ids or (sampling.stop and self._hit_stop_string(running)):
            return "stop"
        return "length" if len(running.ids) >= sampling.max_new_tokens else None

    def _hit_stop_string(self, running: _Running) -> bool:
        """Whether the last token completed a stop string. A token is at least a byte, which bounds how far to look."""
        longest = max(len(s.encode()) for s in running.request.sampling.stop)
        tail = self._tokenizer.decode(running.ids[-longest:])
        return any(s in tail for s in running.request.sampling.stop)

    @torch.inference_mode()
    def _leave(self, slot: int) -> None:
        """Frees a slot; the last running sequence moves into it, so that there is no hole."""
        last = self._running.pop()
        if slot < len(self._running):
            self._cache.copy(len(self._running), slot, last.cached)
            self._running[slot] = last


def _common(a: IntArray, b: IntArray) -> int:
    """How many tokens two sequences have in common at their start."""
    length = min(len(a), len(b))
    differing = np.flatnonzero(a[:length] != b[:length])
    return int(differing[0]) if len(differing) else length
