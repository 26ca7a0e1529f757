"""The engine's model as its docstring says it, one step at a time and one request at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

from roll.simulation.prefixes import Prefix
from roll.simulation.spec import EngineSpec


@dataclass(frozen=True)
class Event:
    """Something that happens to an engine from outside."""

    at_s: float
    kind: str
    """submit, abort, pause or resume."""
    id: str = ""
    prompt_tokens: int = 1
    new_tokens: int = 1
    priority: int = 0
    prefix: Prefix | None = None


@dataclass
class Result:
    finished: dict[str, float] = field(default_factory=dict)
    aborted: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0
    recomputed_tokens: int = 0
    prefilled_tokens: int = 0
    decoded_tokens: int = 0
    kv_high_tokens: int = 0
    running_s: float = 0.0
    busy_s: float = 0.0


@dataclass
class _Request:
    event: Event
    drawn: int = 0
    before: int = 0
    """Drawn before the last step."""
    preempted: bool = False

    @property
    def context(self) -> int:
        return self.event.prompt_tokens + self.drawn


class NaiveEngine:
    def __init__(self, spec: EngineSpec, events: list[Event]) -> None:
        self.spec = spec
        self.events = sorted(events, key=lambda event: event.at_s)
        self.now_s = 0.0
        self.paused = False
        self.waiting: list[_Request] = []
        self.running: list[_Request] = []
        self.prefixes: dict[str, int] = {}
        self.result = Result()

    def run(self) -> Result:
        while True:
            self.take_events()
            self.finish()
            if self.paused or not (self.waiting or self.running):
                if not self.events:
                    return self.result
                self.now_s = self.events[0].at_s
                continue
            prefill = 0 if self.preempt() else self.admit()
            if prefill:
                self.spend(self.spec.prefill_s(prefill))
                self.settle()
            else:
                self.spend(self.spec.step_s(len(self.running), self.used()))
                self.draw()

    def used(self) -> int:
        return sum(request.context for request in self.running)

    def spend(self, seconds: float) -> None:
        self.now_s += seconds
        self.result.busy_s += seconds
        self.result.running_s += seconds * len(self.running)

    def draw(self) -> None:
        self.settle()
        for request in self.running:
            request.drawn += 1
        self.result.decoded_tokens += len(self.running)
        self.note_kv()

    def note_kv(self) -> None:
        self.result.kv_high_tokens = max(self.result.kv_high_tokens, self.used())

    def settle(self) -> None:
        for request in self.running:
            request.before = request.drawn

    def take_events(self) -> None:
        while self.events and self.events[0].at_s <= self.now_s:
            event = self.events.pop(0)
            if event.kind == "submit":
                self.waiting.append(_Request(event))
            elif event.kind == "abort":
                self.abort(event)
            else:
                self.paused = event.kind == "pause"
                if not self.paused:
                    self.prefixes.clear()

    def abort(self, event: Event) -> None:
        for place in (self.running, self.waiting):
            for request in place:
                if request.event.id == event.id:
                    during = place is self.running and event.at_s < self.now_s
                    left = request.before if during else request.drawn
                    self.result.aborted[event.id] = min(left, request.event.new_tokens - 1)
                    place.remove(request)
                    return

    def finish(self) -> None:
        for request in [r for r in self.running if r.drawn == r.event.new_tokens]:
            self.running.remove(request)
            self.result.finished[request.event.id] = self.now_s
            if request.event.prefix is not None:
                self.remember(request.event.prefix, request.context)

    def preempt(self) -> bool:
        gone = False
        while self.used() + len(self.running) > self.spec.kv_tokens:
            lowest = min(request.event.priority for request in self.running)
            victim = [request for request in self.running if request.event.priority == lowest][-1]
            self.running.remove(victim)
            self.waiting.append(victim)
            victim.preempted = gone = True
            self.result.preemptions += 1
        return gone

    def admit(self) -> int:
        prefill = 0
        order = [event.id for event in self.arrivals()]
        while self.waiting:
            head = min(self.waiting, key=lambda r: (-r.event.priority, order.index(r.event.id)))
            needed = self.used() + head.context + len(self.running) + 1 + self.spec.reserve_tokens
            if self.running and (len(self.running) == self.spec.max_running or needed > self.spec.kv_tokens):
                break
            prefill += self.to_compute(head)
            self.waiting.remove(head)
            self.running.append(head)
        self.result.prefilled_tokens += prefill
        self.note_kv()
        return prefill

    def arrivals(self) -> list[Event]:
        return sorted((r.event for r in self.waiting), key=lambda event: (event.at_s, int(event.id)))

    def to_compute(self, request: _Request) -> int:
        if request.preempted:
            self.result.recomputed_tokens += request.context
            return request.context
        prefix = request.event.prefix
        if prefix is None:
            return request.context
        while sum(self.prefixes.values()) > self.spec.kv_tokens - self.used():
            del self.prefixes[next(iter(self.prefixes))]
        known = max(self.prefixes.get(prefix.group, 0), self.prefixes.get(prefix.conversation, 0))
        self.remember(prefix, request.context)
        return max(request.context - known, 0)

    def remember(self, prefix: Prefix, tokens: int) -> None:
        self.prefixes[prefix.group] = max(prefix.group_tokens, self.prefixes.pop(prefix.group, 0))
        if prefix.conversation:
            self.prefixes[prefix.conversation] = max(tokens, self.prefixes.pop(prefix.conversation, 0))
