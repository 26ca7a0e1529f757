"""A model of an inference engine with continuous batching, as vLLM does it, without computing a token.

The engine works in steps. Each step samples one token for every running request and takes

    step_s(batch, cached) = base_s + per_sequence_s × batch + per_cached_token_s × cached

Between two steps, at a *boundary*, finished requests leave, waiting ones are admitted (the highest priority first, then
in order of arrival; none overtakes one that does not fit) and their prompts are computed, during which no request
decodes. If the next tokens of all requests would not fit into the cache, the one admitted last (of the lowest priority)
is preempted and requeued, and none is admitted at that boundary; its prompt and its tokens are computed again when it
returns. Requests that arrive, or leave, during a step do so at its end.

Invariants: the cache never holds more than `kv_tokens`; a request samples exactly `new_tokens` and then `done` is called
once, unless it is aborted or the engine is killed; equal calls at equal times give equal times. A request that is aborted
in the very moment of its last token leaves all tokens but that one: there is always one left to sample.

Steps are never simulated one by one. Until the next request finishes or the cache is full the batch is constant, so that
such a *span* of steps is one timer; a request that joins at step c and samples n tokens finishes at step c + n whatever
else joins or leaves, so a heap by that number is all the engine needs: O(log n) per event.

    two requests, base_s 1, per_sequence_s 0.5, 3 and 5 tokens: step 3 ends at 3 × 2.0 = 6 s, step 5 at 6 + 2 × 1.5 = 9 s
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace

from roll.simulation.prefixes import Prefix, Prefixes
from roll.simulation.spec import EngineSpec
from roll.simulation.step_span import StepSpan

Done = Callable[[str, int], None]
"""Called with a request's id and the number of its sampled tokens."""


class EngineDead(RuntimeError):
    """The engine was killed and has not been restored."""


@dataclass
class SimEngineStats:
    """Counts since the engine was created."""

    busy_s: float = 0.0
    """Seconds in which it computed."""
    running_s: float = 0.0
    """Integral of the number of running requests over time: divided by `max_running` × time it is the utilisation."""
    prefilled_tokens: int = 0
    """Context tokens computed, including recomputed ones."""
    decoded_tokens: int = 0
    """Tokens sampled, including those of requests that were aborted or lost."""
    recomputed_tokens: int = 0
    """Context tokens computed again after a preemption."""
    preemptions: int = 0
    kv_high_tokens: int = 0
    """Maximum number of tokens in the cache."""

    def add(self, span: StepSpan, steps: int, now_s: float, used_tokens: int) -> None:
        """Counts a span up to now."""
        self.busy_s += now_s - span.entered_s
        self.running_s += (now_s - span.entered_s) * span.batch
        self.decoded_tokens += steps * span.batch
        self.kv_high_tokens = max(self.kv_high_tokens, used_tokens)


@dataclass(slots=True, eq=False)
class _Request:
    id: str
    prompt_tokens: int
    new_tokens: int
    done: Done
    priority: int
    prefix: Prefix | None
    arrival: int
    tokens: int = 0
    """Tokens sampled before it last joined the batch."""
    joined: int = 0
    """The engine's step at which it joined."""
    slot: int = -1
    """Number of its admission; -1 while it waits and after it has left."""
    preempted: bool = False

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.tokens


class SimEngine:
    def __init__(self, loop: asyncio.AbstractEventLoop, spec: EngineSpec) -> None:
        self.spec = spec
        self._loop = loop
        self._alive = True
        self._paused = False
        self._arrivals = 0
        self._slots_given = 0
        self._stats = SimEngineStats()
        self._prefixes = Prefixes()
        self._empty()

    def _empty(self) -> None:
        self._step = 0
        self._requests: dict[str, _Request] = {}
        self._waiting: list[tuple[int, int, _Request]] = []
        """Heap by decreasing priority, then arrival."""
        self._finishing: list[tuple[int, int, _Request]] = []
        """Heap by the step at which a running request draws its last token."""
        self._youngest: list[tuple[int, int, _Request]] = []
        """Heap by priority, then decreasing admission number: the next to preempt is first."""
        self._leaving: list[_Request] = []
        """Requests aborted during the span: they keep their slots and cache until its end."""
        self._running = 0
        self._used_tokens = 0
        """Tokens in the cache at the beginning of the span."""
        self._span: StepSpan | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __contains__(self, id: str) -> bool:
        return id in self._requests

    @property
    def alive(self) -> bool:
        return self._alive

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def running(self) -> int:
        return self._running - len(self._leaving)

    @property
    def waiting(self) -> int:
        return len(self._requests) - self.running

    @property
    def kv_used_tokens(self) -> int:
        """Tokens in the cache after the last step that has ended."""
        grown = self._steps_now() * self._span.batch if self._span is not None else 0
        return self._used_tokens + grown

    @property
    def stats(self) -> SimEngineStats:
        """The counts as of now."""
        stats = replace(self._stats)
        if self._span is not None:
            stats.add(self._span, self._steps_now(), self._loop.time(), self.kv_used_tokens)
        return stats

    def submit(
        self,
        id: str,
        prompt_tokens: int,
        new_tokens: int,
        done: Done,
        priority: int = 0,
        *,
        prefix: Prefix | None = None,
    ) -> None:
        """Queues a request; higher priorities go first. With a `prefix`, only the part of the prompt that is not in the
        prefix cache is computed."""
        if not self._alive:
            raise EngineDead(f"request {id!r} cannot be submitted: the engine is dead; restore() it first")
        if id in self._requests:
            raise ValueError(f"request {id!r} is here already")
        if prompt_tokens < 1 or new_tokens < 1:
            raise ValueError(f"request {id!r} needs a prompt and new tokens, got {prompt_tokens} and {new_tokens}")
        if prompt_tokens + new_tokens > self.spec.kv_tokens:
            size = f"{prompt_tokens} + {new_tokens} tokens"
            raise ValueError(f"request {id!r} of {size} can never fit a cache of {self.spec.kv_tokens}")
        self._arrivals += 1
        self._requests[id] = request = _Request(id, prompt_tokens, new_tokens, done, priority, prefix, self._arrivals)
        self._queue(request)
        self._schedule_admission()

    def abort(self, id: str) -> int:
        """Ends a request without calling its `done`; returns the number of tokens with which it can continue
        elsewhere."""
        tokens = self.tokens_of(id)
        request = self._requests.pop(id)
        tokens = min(tokens, request.new_tokens - 1)
        if request.slot < 0:
            self._schedule_admission()
        else:
            request.slot = -1
            self._leaving.append(request)
            if self._span is None:
                self._remove_leaving()
            else:
                self._end_span_at_boundary()
        return tokens

    def tokens_of(self, id: str) -> int:
        """Number of tokens that a request has sampled so far."""
        if id not in self._requests:
            raise KeyError(f"request {id!r} is not on this engine")
        return self._sampled_tokens(self._requests[id], self._steps_now())

    def pause(self) -> None:
        """The current step ends, then nothing runs until `resume`. Requests may arrive and leave meanwhile."""
        self._paused = True
        if self._span is not None:
            self._end_span_at_boundary()

    def resume(self, *, new_weights: bool = True) -> None:
        """Continues after a pause. The prefix cache belongs to the old weights and is cleared; running requests keep
        theirs."""
        self._paused = False
        if new_weights:
            self._prefixes.clear()
        if self._span is None:
            self._end_span_at_boundary()

    def kill(self) -> dict[str, int]:
        """The engine dies. Returns all its requests with the tokens that each leaves; their `done` is never called."""
        steps = self._steps_now()
        lost = {r.id: min(self._sampled_tokens(r, steps), r.new_tokens - 1) for r in self._requests.values()}
        if self._span is not None:
            self._stats.add(self._span, steps, self._loop.time(), self.kv_used_tokens)
        if self._timer is not None:
            self._timer.cancel()
        self._prefixes.clear()
        self._empty()
        self._alive, self._paused = False, False
        return lost

    def restore(self) -> None:
        """A dead engine is restarted, empty."""
        self._alive = True

    def _steps_now(self) -> int:
        return self._span.steps_by(self._loop.time()) if self._span is not None else 0

    def _sampled_tokens(self, request: _Request, steps: int) -> int:
        """Tokens of a request after `steps` steps of the span."""
        return request.tokens + (self._step + steps - request.joined if request.slot >= 0 else 0)

    def _queue(self, request: _Request) -> None:
        heapq.heappush(self._waiting, (-request.priority, request.arrival, request))

    def _head(self) -> _Request | None:
        """The next request to be admitted."""
        while self._waiting:
            request = self._waiting[0][2]
            if self._requests.get(request.id) is request:
                return request
            heapq.heappop(self._waiting)
        return None

    def _schedule_admission(self) -> None:
        """Schedules an admission at the next boundary if the head of the queue fits then. If it does not, it will not fit
        at the later boundaries of this span either: the cache only fills."""
        head = self._head()
        if head is None or self._paused:
            return
        if self._span is None:
            self._end_span_at_boundary()
            return
        steps = self._span.boundary_from(self._loop.time())
        if self._fits(head, self._used_tokens + steps * self._span.batch):
            self._end_span_at_boundary()

    def _fits(self, request: _Request, used_tokens: int) -> bool:
        """Whether there is a free slot, and space for the context and the next token of all requests."""
        if self._running == 0:
            return True
        needed = used_tokens + request.context_tokens + self._running + 1 + self.spec.reserve_tokens
        return self._running < self.spec.max_running and needed <= self.spec.kv_tokens

    def _end_span_at_boundary(self) -> None:
        """Ends the span at its next boundary; without a span, that is now."""
        now_s = self._loop.time()
        span = self._span
        if span is None:
            if self._timer is None:
                self._timer = self._loop.call_at(now_s, self._boundary)
            return
        steps = span.boundary_from(now_s)
        if steps < span.steps:
            span.steps = steps
            assert self._timer is not None
            self._timer.cancel()
            self._timer = self._loop.call_at(span.end_s(steps), self._boundary)

    def _boundary(self) -> None:
        self._timer = None
        if self._span is not None:
            self._end_span(self._span)
        self._remove_leaving()
        finished = self._finished()
        if not self._paused:
            self._start_span()
        for request in finished:
            request.done(request.id, request.new_tokens)

    def _end_span(self, span: StepSpan) -> None:
        self._step += span.steps
        self._used_tokens += span.steps * span.batch
        self._stats.add(span, span.steps, self._loop.time(), self._used_tokens)
        self._span = None

    def _remove_leaving(self) -> None:
        for request in self._leaving:
            self._release_slot(request)
        self._leaving.clear()

    def _finished(self) -> list[_Request]:
        finished = []
        while self._finishing and self._finishing[0][0] <= self._step:
            _, slot, request = heapq.heappop(self._finishing)
            if request.slot == slot:
                finished.append(request)
                self._release_slot(request)
                del self._requests[request.id]
                if request.prefix is not None:
                    self._prefixes.remember(request.prefix, request.context_tokens)
        return finished

    def _release_slot(self, request: _Request) -> None:
        request.tokens += self._step - request.joined
        request.slot = -1
        self._running -= 1
        self._used_tokens -= request.context_tokens

    def _start_span(self) -> None:
        preempted = self._preempt()
        computed = 0 if preempted else self._admit()
        if self._running == 0:
            return
        spec, batch, used = self.spec, self._running, self._used_tokens
        square_s = spec.per_cached_token_s * batch / 2
        now_s = self._loop.time()
        self._span = StepSpan(
            entered_s=now_s,
            start_s=now_s + spec.prefill_s(computed),
            batch=batch,
            linear_s=spec.step_s(batch, used) - square_s,
            square_s=square_s,
            steps=1 if preempted else min(self._first_finish() - self._step, (spec.kv_tokens - used) // batch),
        )
        self._timer = self._loop.call_at(self._span.end_s(self._span.steps), self._boundary)

    def _preempt(self) -> bool:
        """Makes space for the next token of all requests; returns whether one was preempted."""
        preempted_any = False
        while self._used_tokens + self._running > self.spec.kv_tokens:
            _, negative_slot, request = heapq.heappop(self._youngest)
            if request.slot != -negative_slot:
                continue
            self._release_slot(request)
            request.preempted = True
            self._queue(request)
            self._stats.preemptions += 1
            preempted_any = True
        return preempted_any

    def _admit(self) -> int:
        """Admits waiting requests as far as they fit; returns the tokens to compute before they can decode."""
        computed = 0
        while (request := self._head()) is not None and self._fits(request, self._used_tokens):
            heapq.heappop(self._waiting)
            computed += self._to_compute(request)
            self._slots_given += 1
            request.slot, request.joined = self._slots_given, self._step
            self._running += 1
            self._used_tokens += request.context_tokens
            heapq.heappush(
                self._finishing, (self._step + request.new_tokens - request.tokens, self._slots_given, request)
            )
            heapq.heappush(self._youngest, (request.priority, -self._slots_given, request))
        if len(self._youngest) > 64 + 2 * self._running:
            self._youngest = [entry for entry in self._youngest if entry[2].slot == -entry[1]]
            heapq.heapify(self._youngest)
        self._stats.prefilled_tokens += computed
        return computed

    def _to_compute(self, request: _Request) -> int:
        """Tokens of a request's context that are not in the cache."""
        if request.preempted:
            self._stats.recomputed_tokens += request.context_tokens
            return request.context_tokens
        if request.prefix is None:
            return request.prompt_tokens
        self._prefixes.shrink(self.spec.kv_tokens - self._used_tokens)
        known = self._prefixes.known(request.prefix)
        self._prefixes.remember(request.prefix, request.prompt_tokens)
        return max(request.prompt_tokens - known, 0)

    def _first_finish(self) -> int:
        while self._finishing[0][2].slot != self._finishing[0][1]:
            heapq.heappop(self._finishing)
        return self._finishing[0][0]
