"""The router: which engine a group goes to, with a view of all of them.

A group goes to the engine that is least full, of samples or of cached tokens, whichever is scarcer there; all its
samples go there together, because they share their prompt, and stay, because their turns do too. While every engine is
full, groups wait here, the highest priority first, then the oldest: bound to an engine only when it has room, so that
none is idle while another has a queue. Engines leave while their device is needed for something else, die, and join
again.

What always holds: an engine that has left has nothing to do when `drain` returns, and gets nothing before it joins; no
group waits while an engine that is in has room; an engine holds at most one group more than it has room for.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from roll.config.errors import RunError

_KV_MARGIN = 0.95
"""Share of an engine's cache that is planned for: lengths are only expected."""
_DRIFT = 0.1
"""By what share the lengths seen may differ from the one planned with: changing it means to compare all engines anew."""


@dataclass(eq=False)
class SlotReservation:
    """Places on an engine."""

    engine: int
    incarnation: int
    samples: int


@dataclass(order=True)
class _Want:
    rank: tuple[int, int, int]
    samples: int = field(compare=False)
    seat: asyncio.Future[SlotReservation] = field(compare=False)


@dataclass
class _Engine:
    running: int = 0
    """Samples that have places on it."""
    cached: int | None = None
    """Tokens in its cache, as it last said; None if it never did."""
    since: int = 0
    """Places given since it said so."""
    incarnation: int = 0


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
        """`max_running` and `kv_tokens` of an engine, 0 for no limit; `expected_tokens` of a sample, before any was seen.
        Nobody waits longer than `deadline_s` without anything moving."""
        self._engines = [_Engine() for _ in range(engines)]
        self._inside = set(range(engines))
        self._deadline_s = deadline_s
        self._max_running = max_running
        self._kv_tokens = kv_tokens
        self._seen = self._expected = expected_tokens
        """Tokens of the latest samples, and what is planned with for all engines alike."""
        self._waiting: list[_Want] = []
        self._order = 0
        self._held: set[str] = set()
        self._moves = 0
        self._changed = asyncio.Event()
        self._least: list[tuple[float, float, int]] = []
        """Heap of engines by how full they are; entries that are out of date are skipped."""
        self._keys: list[tuple[float, float, int]] = []
        self._rebuild()

    @property
    def inside(self) -> frozenset[int]:
        """Engines that take groups."""
        return frozenset(self._inside)

    @property
    def waiting(self) -> int:
        """Groups that wait for a place."""
        return sum(not want.seat.done() for want in self._waiting)

    def running(self, engine: int) -> int:
        """Samples that have places on an engine."""
        return self._engines[engine].running

    async def reserve(self, samples: int, *, priority: int = 0, order: int | None = None) -> SlotReservation:
        """Places for so many samples on one engine. A higher priority goes first, then a lower `order`."""
        self._order += 1
        rank = (-priority, self._order if order is None else order, self._order)
        want = _Want(rank, samples, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting, want)
        self._settle()
        try:
            return await self._patiently(want)
        except asyncio.CancelledError:
            if want.seat.done() and not want.seat.cancelled():
                self.release(want.seat.result())
            want.seat.cancel()
            raise

    def take(self, engine: int) -> SlotReservation:
        """A place for a sample that goes on where its conversation is, at once, whether or not there is room."""
        there = self._engines[engine]
        there.running += 1
        there.since += 1
        self._push(engine)
        return SlotReservation(engine, there.incarnation, 1)

    def release(self, ticket: SlotReservation, samples: int | None = None) -> None:
        """Gives back places, all that are left by default. Those of an engine that was lost are gone already."""
        engine = self._engines[ticket.engine]
        count = ticket.samples if samples is None else min(samples, ticket.samples)
        ticket.samples -= count
        if ticket.incarnation != engine.incarnation or not count:
            return
        engine.running -= count
        engine.since = min(engine.since, engine.running)
        if not engine.running and engine.cached is not None:
            engine.cached = 0
        self._notice(ticket.engine)

    def learn(self, tokens: int) -> None:
        """A sample ended with so many tokens in all: later ones are expected to need as many as the latest did."""
        self._seen += (tokens - self._seen) * 0.01
        if abs(self._seen - self._expected) > _DRIFT * self._expected:
            self._expected = self._seen
            self._rebuild()
            self._settle()

    def report(self, engine: int, cached_tokens: int) -> None:
        """What an engine says of its cache."""
        self._engines[engine].cached, self._engines[engine].since = cached_tokens, 0
        self._notice(engine)

    def pause_admission(self, held: bool, why: str = "weights") -> None:
        """While held, for any reason, nobody gets a place."""
        if held:
            self._held.add(why)
        else:
            self._held.discard(why)
            self._settle()

    def close_engine(self, engine: int) -> None:
        """The engine gets nothing new from now on."""
        self._inside.discard(engine)

    async def drain(self, engine: int) -> None:
        """Returns once the engine has nothing to do; it gets nothing new from now on."""
        self.close_engine(engine)
        await self._until(lambda: self._engines[engine].running == 0, f"engine {engine} has not finished its samples")

    def mark_dead(self, engine: int) -> None:
        """The engine is dead: it gets nothing until it joins, and what was on it needs other places."""
        self._inside.discard(engine)
        self._engines[engine] = _Engine(incarnation=self._engines[engine].incarnation + 1)
        self._notice(engine)

    def add_engine(self, engine: int) -> None:
        self._inside.add(engine)
        self._notice(engine)

    async def _patiently(self, want: _Want) -> SlotReservation:
        while True:
            moves = self._moves
            done, _ = await asyncio.wait([want.seat], timeout=self._deadline_s)
            if done:
                return want.seat.result()
            if self._moves == moves:
                want.seat.cancel()
                why = "engines are full and nothing ends" if self._inside else "no engine has joined"
                raise RunError(f"{why} for {self._deadline_s:g} s")

    def _settle(self) -> None:
        """Gives places to those who wait, as far as there is room."""
        while self._waiting and not self._held:
            if self._waiting[0].seat.done():
                heapq.heappop(self._waiting)
                continue
            best = self._least_full()
            if best is None or not self._has_room(best, self._waiting[0].samples):
                return
            want = heapq.heappop(self._waiting)
            engine = self._engines[best]
            engine.running += want.samples
            engine.since += want.samples
            self._push(best)
            want.seat.set_result(SlotReservation(best, engine.incarnation, want.samples))

    def _has_room(self, number: int, samples: int) -> bool:
        engine = self._engines[number]
        if engine.running == 0:
            return True
        if self._max_running and engine.running >= self._max_running:
            return False
        return not self._kv_tokens or self._load(engine) + samples * self._expected <= _KV_MARGIN * self._kv_tokens

    def _load(self, engine: _Engine) -> float:
        """Tokens in its cache, with what was sent there since it last said."""
        if engine.cached is None:
            return engine.running * self._expected
        return engine.cached + engine.since * self._expected

    def _key(self, number: int) -> tuple[float, float, int]:
        engine = self._engines[number]
        load = self._load(engine)
        full = engine.running / self._max_running if self._max_running else 0.0
        if self._kv_tokens:
            full = max(full, load / self._kv_tokens)
        return full, load, number

    def _least_full(self) -> int | None:
        heap = self._least
        while heap and (heap[0] != self._keys[heap[0][2]] or heap[0][2] not in self._inside):
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def _push(self, number: int) -> None:
        if len(self._least) > 4 * len(self._engines) + 64:
            self._rebuild()
        self._keys[number] = self._key(number)
        heapq.heappush(self._least, self._keys[number])

    def _rebuild(self) -> None:
        self._keys = [self._key(number) for number in range(len(self._engines))]
        self._least = [self._keys[number] for number in sorted(self._inside)]
        heapq.heapify(self._least)

    def _notice(self, number: int) -> None:
        """Something changed at an engine: who waits may go on now."""
        self._moves += 1
        self._push(number)
        self._settle()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _until(self, holds: Callable[[], bool], otherwise: str) -> None:
        try:
            async with asyncio.timeout(self._deadline_s):
                while not holds():
                    await self._changed.wait()
        except TimeoutError:
            raise RunError(f"{otherwise} for {self._deadline_s:g} s") from None
