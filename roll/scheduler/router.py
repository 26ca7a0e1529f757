"""The router: assigns groups to engines by load.

A group goes to the least full engine; fullness is the larger of its slot usage and its KV cache usage. All samples of a
group go to the same engine, because they share a prompt, and stay there between turns, because the turns share a prefix.
While every engine is full, groups wait here in one queue, highest priority first, then oldest first. A group is bound to
an engine only when the engine has free slots, so no engine is idle while another has a queue. Engines are drained while
their device is needed for something else, die, and are added again.

Invariants: when `drain` returns, the engine has no samples, and it gets none until `add_engine`; no group waits while an
open engine has free slots (and admission is not paused); an engine exceeds its limits by at most one group, apart from
samples that return to it with `reserve_on`.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from roll.config.errors import RunError

_KV_MARGIN = 0.95
"""Share of an engine's KV cache that the router fills: lengths are only estimates."""
_DRIFT = 0.1
"""Relative drift of the observed mean length that triggers re-scoring of all engines."""


@dataclass(eq=False)
class SlotReservation:
    """Reserved slots on an engine."""

    engine: int
    restart_count: int
    samples: int


@dataclass(order=True)
class _PendingReservation:
    rank: tuple[int, int, int]
    samples: int = field(compare=False)
    reservation: asyncio.Future[SlotReservation] = field(compare=False)


@dataclass
class _Engine:
    running: int = 0
    """Reserved slots."""
    cached: int | None = None
    """Tokens in its KV cache, as last reported; None before the first report."""
    since: int = 0
    """Slots reserved since that report."""
    restart_count: int = 0


class Router:
    def __init__(
        self,
        engines: int,
        deadline_s: float = 1800.0,
        *,
        max_running: int = 0,
        kv_tokens: int = 0,
        expected_tokens: float = 512.0,
    ) -> None:
        """`max_running` and `kv_tokens` are limits per engine, 0 for none; `expected_tokens` is the first estimate of a
        sample's length. A reservation fails if nothing changes on any engine for `deadline_s`."""
        self._engines = [_Engine() for _ in range(engines)]
        self._open_engines = set(range(engines))
        self._deadline_s = deadline_s
        self._max_running = max_running
        self._kv_tokens = kv_tokens
        self._mean_tokens = self._expected_tokens = expected_tokens
        """Running mean of the samples' lengths in tokens, and the length that all engines are scored with."""
        self._waiting: list[_PendingReservation] = []
        self._next_fifo_key = 0
        self._pause_reasons: set[str] = set()
        self._changes = 0
        self._watchers: list[asyncio.Event] = []
        """Set at the next change."""
        self._outdated: set[int] = set()
        """Engines whose fullness has changed since it was computed."""
        self._fullness_heap: list[tuple[float, float, int]] = []
        """Heap of engines by fullness; outdated entries are skipped."""
        self._fullness: list[tuple[float, float, int]] = []
        self._rebuild()

    @property
    def open_engines(self) -> frozenset[int]:
        """Engines that accept groups."""
        return frozenset(self._open_engines)

    @property
    def waiting(self) -> int:
        """Reservations that are waiting for slots."""
        return sum(not pending.reservation.done() for pending in self._waiting)

    def running(self, engine: int) -> int:
        """Reserved slots on an engine."""
        return self._engines[engine].running

    async def reserve(self, samples: int, *, priority: int = 0, fifo_key: int | None = None) -> SlotReservation:
        """Reserves one slot per sample on one engine. A higher priority is served first, then a lower `fifo_key`."""
        self._next_fifo_key += 1
        rank = (-priority, self._next_fifo_key if fifo_key is None else fifo_key, self._next_fifo_key)
        pending = _PendingReservation(rank, samples, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting, pending)
        self._serve_waiting()
        try:
            return await self._wait_for(pending)
        except asyncio.CancelledError:
            if pending.reservation.done() and not pending.reservation.cancelled():
                self.release(pending.reservation.result())
            pending.reservation.cancel()
            raise

    def reserve_on(self, engine: int) -> SlotReservation:
        """Reserves a slot on the engine that holds a sample's earlier turns, at once, even if the engine is full."""
        state = self._engines[engine]
        state.running += 1
        state.since += 1
        self._outdated.add(engine)
        return SlotReservation(engine, state.restart_count, 1)

    def release(self, reservation: SlotReservation, samples: int | None = None) -> None:
        """Releases slots, by default all that are left. Has no effect on an engine that has died since."""
        engine = self._engines[reservation.engine]
        count = reservation.samples if samples is None else min(samples, reservation.samples)
        reservation.samples -= count
        if reservation.restart_count != engine.restart_count or not count:
            return
        engine.running -= count
        engine.since = min(engine.since, engine.running)
        if not engine.running and engine.cached is not None:
            engine.cached = 0
        self._engine_changed(reservation.engine)

    def observe_length(self, tokens: int) -> None:
        """Updates the expected length with the total tokens of a finished sample (exponential moving average)."""
        self._mean_tokens += (tokens - self._mean_tokens) * 0.01
        if abs(self._mean_tokens - self._expected_tokens) > _DRIFT * self._expected_tokens:
            self._expected_tokens = self._mean_tokens
            self._rebuild()
            self._serve_waiting()

    def report(self, engine: int, cached_tokens: int) -> None:
        """Records how many tokens an engine has in its KV cache. What an idle engine keeps gives way to new samples."""
        state = self._engines[engine]
        state.cached, state.since = cached_tokens if state.running else 0, 0
        self._engine_changed(engine)

    def pause_admission(self, paused: bool, reason: str = "weights") -> None:
        """Pauses (`held`) or resumes admission for one reason. No slots are reserved while any reason is active."""
        if paused:
            self._pause_reasons.add(reason)
        else:
            self._pause_reasons.discard(reason)
            self._serve_waiting()

    def close_engine(self, engine: int) -> None:
        """Stops sending new groups to the engine."""
        self._open_engines.discard(engine)

    async def drain(self, engine: int) -> None:
        """Stops sending new groups to the engine and returns once it has no samples."""
        self.close_engine(engine)
        await self._wait_until(
            lambda: self._engines[engine].running == 0, f"engine {engine} has not finished its samples"
        )

    def mark_dead(self, engine: int) -> None:
        """The engine died: it gets no groups until `add_engine`, and its reservations are void."""
        self._open_engines.discard(engine)
        self._engines[engine] = _Engine(restart_count=self._engines[engine].restart_count + 1)
        self._engine_changed(engine)

    def add_engine(self, engine: int) -> None:
        self._open_engines.add(engine)
        self._engine_changed(engine)

    async def _wait_for(self, pending: _PendingReservation) -> SlotReservation:
        while True:
            changes = self._changes
            done, _ = await asyncio.wait([pending.reservation], timeout=self._deadline_s)
            if done:
                return pending.reservation.result()
            if self._changes == changes:
                pending.reservation.cancel()
                problem = "engines are full and nothing ends" if self._open_engines else "no engine has joined"
                raise RunError(f"{problem} for {self._deadline_s:g} s")

    def _serve_waiting(self) -> None:
        """Serves waiting reservations until the least full engine has no free slots."""
        while self._waiting and not self._pause_reasons:
            if self._waiting[0].reservation.done():
                heapq.heappop(self._waiting)
                continue
            best = self._least_full()
            if best is None or not self._has_capacity(best, self._waiting[0].samples):
                return
            pending = heapq.heappop(self._waiting)
            engine = self._engines[best]
            engine.running += pending.samples
            engine.since += pending.samples
            self._outdated.add(best)
            pending.reservation.set_result(SlotReservation(best, engine.restart_count, pending.samples))

    def _has_capacity(self, number: int, samples: int) -> bool:
        engine = self._engines[number]
        if engine.running == 0:
            return True
        if self._max_running and engine.running >= self._max_running:
            return False
        return not self._kv_tokens or self._load(engine) + samples * self._expected_tokens <= _KV_MARGIN * self._kv_tokens

    def _load(self, engine: _Engine) -> float:
        """Expected tokens in its KV cache: the reported ones plus those of the slots reserved since."""
        if engine.cached is None:
            return engine.running * self._expected_tokens
        return engine.cached + engine.since * self._expected_tokens

    def _fullness_of(self, number: int) -> tuple[float, float, int]:
        engine = self._engines[number]
        load = self._load(engine)
        fullness = engine.running / self._max_running if self._max_running else 0.0
        if self._kv_tokens:
            fullness = max(fullness, load / self._kv_tokens)
        return fullness, load, number

    def _least_full(self) -> int | None:
        heap = self._fullness_heap
        if len(heap) > 4 * len(self._engines) + 64:
            self._rebuild()
            heap = self._fullness_heap
        for number in self._outdated:
            self._fullness[number] = self._fullness_of(number)
            heapq.heappush(heap, self._fullness[number])
        self._outdated.clear()
        while heap and (heap[0] != self._fullness[heap[0][2]] or heap[0][2] not in self._open_engines):
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def _rebuild(self) -> None:
        self._fullness = [self._fullness_of(number) for number in range(len(self._engines))]
        self._fullness_heap = [self._fullness[number] for number in sorted(self._open_engines)]
        heapq.heapify(self._fullness_heap)
        self._outdated.clear()

    def _engine_changed(self, number: int) -> None:
        """Called when an engine's load or membership changed: serves waiting reservations and wakes `drain`."""
        self._changes += 1
        self._outdated.add(number)
        self._serve_waiting()
        for watcher in self._watchers:
            watcher.set()
        self._watchers.clear()

    async def _wait_until(self, condition: Callable[[], bool], problem: str) -> None:
        try:
            async with asyncio.timeout(self._deadline_s):
                while not condition():
                    self._watchers.append(changed := asyncio.Event())
                    await changed.wait()
        except TimeoutError:
            raise RunError(f"{problem} for {self._deadline_s:g} s") from None
