"""Whatever dies, hangs or fails in whatever order: losses are reported once, waits are as promised, and it settles."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis_examples import examples
from toy_workers import SOON_S, ToyExecutor, ToyHandle, VirtualClock, Watched, now_s

from roll.cluster import RestartPolicy
from roll.cluster.errors import WorkerDied
from roll.config.errors import RunError

COUNT = 3
RANKS = st.integers(0, COUNT - 1)
POLICY = RestartPolicy(ping_s=1, hang_s=10, restarts=4, window_s=60, backoff_s=0.5, backoff_most_s=3)
NEXT = {"": "L", "L": "R", "R": "FS", "F": "R", "S": "XO", "X": "R", "O": "L"}
"""What may follow in a worker's life: Lost, Restart begins, restart Fails, reStoring begins, fails (X), or is Over."""


class Life(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=VirtualClock)
        self.events: list[tuple[float, str, int]] = []
        self.restoring: dict[int, list[str]] = {rank: [] for rank in range(COUNT)}
        self.died_s: dict[int, float] = {}
        self.closed = False

    @initialize()
    def start(self) -> None:
        async def make() -> Watched:
            watched = Watched(COUNT, POLICY)
            watched.executor = Noting(self.note)
            watched.cluster._executor = watched.executor  # type: ignore[assignment]
            watched.supervisor.watch(watched.cluster, lambda rank, why: self.note("L", rank), self.restore)
            return watched

        self.watched = self.runner.run(make())

    def note(self, what: str, rank: int) -> None:
        self.events.append((asyncio.get_running_loop().time(), what, rank))

    async def restore(self, rank: int) -> None:
        self.note("S", rank)
        fault = self.restoring[rank].pop(0) if self.restoring[rank] else ""
        try:
            await asyncio.sleep(0.3)
            if fault in ("dead", "hung"):
                self.set(rank, fault)
            if fault:
                await asyncio.sleep(4)
            if fault == "raises":
                raise WorkerDied("other[0]", "gone")
            self.note("O", rank)
        except BaseException:
            if not self.closed:
                self.note("X", rank)
            raise

    def set(self, rank: int, state: Any) -> None:
        handle = self.watched.handles[rank]
        if handle.state == "dead":
            return
        handle.become(state)
        self.died_s[rank] = now_s()

    def at_once(self, act: Callable[[], None]) -> None:
        async def main() -> None:
            act()

        self.runner.run(main())

    @rule(rank=RANKS, state=st.sampled_from(["dead", "hung", "well"]))
    def happens(self, rank: int, state: str) -> None:
        self.at_once(lambda: self.set(rank, state))

    @rule(rank=RANKS)
    def misses_a_ping(self, rank: int) -> None:
        self.watched.handles[rank].deaf = 1

    @rule(rank=RANKS, times=st.integers(1, 2))
    def restarts_fail(self, rank: int, times: int) -> None:
        error = RunError("it has not started")
        self.watched.executor.errors.setdefault(f"toy[{rank}]", []).extend([error] * times)

    @rule(rank=RANKS, fault=st.sampled_from(["raises", "dead", "hung", "slow"]))
    def restoring_fails(self, rank: int, fault: str) -> None:
        self.restoring[rank].append(fault)

    @rule(rank=RANKS)
    def suspected(self, rank: int) -> None:
        self.at_once(lambda: self.watched.supervisor.probe_now("toy", rank))

    @rule(rank=RANKS)
    def condemned(self, rank: int) -> None:
        self.at_once(lambda: self.watched.supervisor.mark_unhealthy("toy", rank, "it answers nonsense"))

    @rule(seconds=st.sampled_from([0.05, 0.5, 1.5, 5, 12, 40]))
    def time_passes(self, seconds: float) -> None:
        self.runner.run(asyncio.sleep(seconds))

    @precondition(lambda self: len(self.events) > 4)
    @rule()
    def closes(self) -> None:
        """Nothing happens after it."""
        self.closed = True
        self.runner.run(self.watched.supervisor.close())
        seen = len(self.events)
        self.runner.run(asyncio.sleep(100))
        assert len(self.events) == seen

    @invariant()
    def lives_are_as_drawn(self) -> None:
        last = dict.fromkeys(range(COUNT), "")
        for _, what, rank in self.events:
            assert what in NEXT[last[rank]], [(at, each) for at, each, who in self.events if who == rank]
            last[rank] = what

    @invariant()
    def restarts_come_when_promised_and_failures_end_it(self) -> None:
        failures: list[tuple[float, int]] = []
        ended_s = float("inf")

        def recent(until_s: float) -> list[int]:
            return [rank for at, rank in failures if until_s - POLICY.window_s <= at <= until_s]

        for at, what, rank in self.events:
            assert at <= ended_s
            if what in "LFX" and ended_s == float("inf"):
                failures.append((at, rank))
                ended_s = at if len(recent(at)) > POLICY.restarts else ended_s
            if what == "R":
                failed_s = max(when for when, who in failures if who == rank)
                promised_s = min(0.5 * 2 ** (recent(failed_s).count(rank) - 1), 3)
                assert abs(at - failed_s - promised_s) < 1e-4
        failed = self.watched.supervisor.failed
        assert (failed.done() and failed.exception() is not None) == (ended_s < float("inf"))

    @invariant()
    def a_death_is_noticed_soon(self) -> None:
        if self.watched.supervisor.failed.done():
            return

        def look() -> None:
            for rank, status in enumerate(self.watched.supervisor.status()):
                state = self.watched.handles[rank].state
                if status.state == "well" and state != "well":
                    bound_s = SOON_S + (POLICY.hang_s if state == "hung" else 0)
                    assert now_s() - self.died_s[rank] <= bound_s + 1e-4

        self.at_once(look)

    def teardown(self) -> None:
        if not hasattr(self, "watched"):
            return
        for handle in self.watched.handles:
            handle.deaf = 0
        for faults in self.restoring.values():
            faults.clear()
        self.watched.executor.errors.clear()
        self.runner.run(asyncio.sleep(60))
        if not self.watched.supervisor.failed.done():
            assert self.runner.run(self.look()) == ["well"] * COUNT
        self.restarts_come_when_promised_and_failures_end_it()
        self.runner.run(self.watched.supervisor.close())
        self.runner.run(self.nothing_is_left())
        self.runner.close()

    async def look(self) -> list[str]:
        for handle in self.watched.handles:
            assert handle.state == "well"
            assert now_s() - handle.pings[-1] <= SOON_S + 1e-4
        return self.watched.states

    async def nothing_is_left(self) -> None:
        assert asyncio.all_tasks() == {asyncio.current_task()}


class Noting(ToyExecutor):
    """Notes when restarts begin and fail."""

    def __init__(self, note: Callable[[str, int], None]) -> None:
        super().__init__()
        self._note = note

    async def restart(self, handle: ToyHandle) -> None:
        self._note("R", handle.placement.rank)
        try:
            await super().restart(handle)
        except RunError:
            self._note("F", handle.placement.rank)
            raise


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=examples(50), stateful_step_count=30, derandomize=True, deadline=None)
