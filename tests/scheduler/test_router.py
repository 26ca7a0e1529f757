"""The router: which engine a group gets, who waits and in which order, and how engines leave, die and join meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from rollout_toys import go, turns

from roll.config.errors import RunError
from roll.scheduler.router import Router, SlotReservation


class Guests:
    """Groups that sit with engines until they are told to go."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.tickets: dict[str, SlotReservation] = {}
        self.order: list[str] = []
        """Those who got seats, in the order they did."""
        self.tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def seats(self) -> dict[str, int]:
        return {name: ticket.engine for name, ticket in self.tickets.items()}

    async def come(self, name: str, samples: int = 1, **rank: int) -> None:
        self.tasks[name] = asyncio.create_task(self._sit(name, samples, rank))
        await turns(3)

    async def _sit(self, name: str, samples: int, rank: dict[str, int]) -> None:
        self.tickets[name] = await self.router.reserve(samples, **rank)
        self.order.append(name)

    async def go(self, *names: str) -> None:
        for name in names:
            self.router.release(self.tickets.pop(name))
            await self.tasks.pop(name)
        await turns(3)

    def samples(self, engine: int) -> int:
        return sum(ticket.samples for ticket in self.tickets.values() if ticket.engine == engine)

    async def leave_all(self) -> None:
        while self.tasks:
            await self.go(*list(self.tickets))


def running(router: Router, count: int) -> list[int]:
    return [router.running(engine) for engine in range(count)]


# which engine


def test_a_group_goes_to_the_engine_with_the_fewest_samples() -> None:
    async def main() -> None:
        guests = Guests(Router(3))
        for name, samples in (("a", 10), ("b", 5), ("c", 1), ("d", 1), ("e", 9), ("f", 1)):
            await guests.come(name, samples)
        assert guests.seats == {"a": 0, "b": 1, "c": 2, "d": 2, "e": 2, "f": 1}
        assert running(guests.router, 3) == [10, 6, 11]
        await guests.go("a")
        await guests.come("g", 40)
        assert guests.seats["g"] == 0
        await guests.go(*"bcdefg")
        assert running(guests.router, 3) == [0, 0, 0]

    go(main())


def test_ties_go_to_the_first_engine() -> None:
    async def main() -> None:
        router = Router(3)
        tickets = [await router.reserve(4) for _ in range(6)]
        assert [ticket.engine for ticket in tickets] == [0, 1, 2, 0, 1, 2]
        assert [ticket.samples for ticket in tickets] == [4] * 6

    go(main())


def test_the_engine_that_says_its_cache_is_emptier_is_preferred() -> None:
    async def main() -> None:
        router = Router(2, kv_tokens=10_000, expected_tokens=10)
        first, second = await router.reserve(4), await router.reserve(4)
        assert (first.engine, second.engine) == (0, 1)
        router.report(0, 4000)
        router.report(1, 100)
        assert [(await router.reserve(4)).engine for _ in range(3)] == [1, 1, 1]  # 80 tokens each, as far as is known
        router.report(1, 5000)
        assert (await router.reserve(4)).engine == 0

    go(main())


def test_a_cache_that_would_overflow_takes_no_group_but_an_idle_engine_takes_any() -> None:
    async def main() -> None:
        router = Router(1, kv_tokens=1000, expected_tokens=100)
        guests = Guests(router)
        await guests.come("huge", 50)  # on an idle engine, however long it may become
        assert guests.seats == {"huge": 0}
        await guests.go("huge")
        await guests.come("a", 4)
        await guests.come("b", 5)
        assert guests.seats == {"a": 0, "b": 0}  # 900 tokens, of which 950 may be planned for
        await guests.come("c", 1)
        assert router.waiting == 1
        router.report(0, 300)  # what is there is shorter than was expected
        await turns()
        assert guests.seats["c"] == 0
        assert router.waiting == 0
        await guests.leave_all()

    go(main())


def test_what_samples_came_to_is_what_later_ones_are_expected_to() -> None:
    async def main() -> None:
        router = Router(1, kv_tokens=1000, expected_tokens=10)
        for _ in range(1000):
            router.observe_length(200)
        guests = Guests(router)
        await guests.come("a", 3)
        await guests.come("b", 2)
        assert guests.seats == {"a": 0}
        await guests.come("c", 1)
        assert router.waiting == 2
        await guests.leave_all()

    go(main())


def test_a_slot_is_free_again_however_its_group_ends() -> None:
    async def main() -> None:
        router = Router(2, max_running=2)
        guests = Guests(router)
        await guests.come("a", 2)
        await guests.come("b", 2)
        await guests.come("c", 2)
        assert router.waiting == 1
        guests.tasks["c"].cancel()
        with pytest.raises(asyncio.CancelledError):
            await guests.tasks.pop("c")
        assert (router.waiting, running(router, 2)) == (0, [2, 2])
        await guests.go("a", "b")
        assert running(router, 2) == [0, 0]

    go(main())


def test_a_group_cancelled_in_the_moment_of_its_reservation_releases_it() -> None:
    async def main() -> None:
        router = Router(1, max_running=1)
        first = await router.reserve(1)
        waiting = asyncio.create_task(router.reserve(1))
        await turns()
        router.release(first)
        assert router.running(0) == 1
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert router.running(0) == 0

    go(main())


def test_slots_are_released_one_by_one_and_never_more_than_there_are() -> None:
    async def main() -> None:
        router = Router(1)
        ticket, other = await router.reserve(3), await router.reserve(2)
        router.release(ticket, 1)
        assert router.running(0) == 4
        router.release(ticket, 5)
        router.release(ticket)
        assert (router.running(0), ticket.samples, other.samples) == (2, 0, 2)

    go(main())


def test_a_sample_that_returns_to_its_engine_has_a_slot_at_once() -> None:
    async def main() -> None:
        router = Router(2, max_running=1)
        guests = Guests(router)
        await guests.come("a")
        ticket = router.reserve_on(0)
        assert (ticket.engine, ticket.samples, router.running(0)) == (0, 1, 2)
        await guests.come("b")
        await guests.come("c")
        assert guests.seats == {"a": 0, "b": 1}
        await guests.go("a")
        assert router.waiting == 1  # there is still one on it
        router.release(ticket)
        await turns()
        assert guests.seats["c"] == 0
        await guests.leave_all()
        leaving = router.reserve_on(1)
        router.mark_dead(1)
        router.release(leaving)
        assert running(router, 2) == [0, 0]

    go(main())


# who waits


def test_groups_wait_while_engines_are_full_and_one_more_than_there_is_room_for_may_be_on_each() -> None:
    async def main() -> None:
        router = Router(2, max_running=4)
        guests = Guests(router)
        for name in "abcdef":
            await guests.come(name, 3)
        assert guests.seats == {"a": 0, "b": 1, "c": 0, "d": 1}
        assert running(router, 2) == [6, 6]
        assert router.waiting == 2
        router.release(guests.tickets["a"], 2)
        await turns()
        assert router.waiting == 2  # still as many as may run
        router.release(guests.tickets["a"], 1)
        await turns()
        assert guests.seats["e"] == 0
        await guests.leave_all()
        assert running(router, 2) == [0, 0]

    go(main())


def test_a_higher_priority_goes_first_then_a_lower_fifo_key_then_the_first_to_arrive() -> None:
    async def main() -> None:
        router = Router(1, max_running=1)
        guests = Guests(router)
        await guests.come("first")
        await guests.come("late", fifo_key=7)
        await guests.come("later", fifo_key=9)
        await guests.come("old", fifo_key=2)
        await guests.come("old too", fifo_key=2)
        await guests.come("urgent", priority=1, fifo_key=50)
        await guests.come("most urgent", priority=2, fifo_key=60)
        await guests.come("whenever", priority=-1, fifo_key=0)
        await guests.leave_all()
        expected = ["first", "most urgent", "urgent", "old", "old too", "late", "later", "whenever"]
        assert guests.order == expected

    go(main())


def test_without_an_order_groups_wait_in_the_order_they_came() -> None:
    async def main() -> None:
        guests = Guests(Router(1, max_running=1))
        for name in "abcde":
            await guests.come(name)
        await guests.leave_all()
        assert guests.order == list("abcde")

    go(main())


def test_no_group_gets_slots_while_admission_is_paused() -> None:
    async def main() -> None:
        router = Router(1)
        guests = Guests(router)
        await guests.come("a")
        router.pause_admission(True)
        await guests.come("b")
        await guests.go("a")
        router.add_engine(0)
        await turns()
        assert guests.seats == {}
        router.pause_admission(False)
        await turns()
        assert guests.seats == {"b": 0}
        await guests.leave_all()

    go(main())


def test_nobody_waits_for_ever() -> None:
    async def main() -> None:
        router = Router(2, deadline_s=0.02, max_running=1)
        ticket = await router.reserve(1)
        with pytest.raises(RunError, match=r"engine 0 has not finished its samples for 0\.02 s"):
            await router.drain(ticket.engine)
        await router.reserve(1)
        with pytest.raises(RunError, match=r"engines are full and nothing ends for 0\.02 s"):
            await router.reserve(1)
        router.close_engine(1)
        with pytest.raises(RunError, match=r"no engine has joined for 0\.02 s"):
            await router.reserve(1)
        assert router.waiting == 0

    go(main())


def test_as_long_as_something_ends_waiting_goes_on() -> None:
    async def main() -> None:
        router = Router(1, deadline_s=1, max_running=1)
        guests = Guests(router)
        for number in range(8):
            await guests.come(str(number))
        for number in range(8):  # the last one waits for almost 7 s
            await asyncio.sleep(0.9)
            await guests.go(str(number))

    go(main())


# engines that come and go


def test_an_engine_that_leaves_is_waited_for_and_gets_nothing() -> None:
    async def main() -> None:
        router = Router(2)
        guests = Guests(router)
        await guests.come("a", 1)
        await guests.come("b", 10)
        leaving = asyncio.create_task(router.drain(0))
        await turns()
        assert not leaving.done()
        assert router.open_engines == {1}
        await guests.come("c", 1)
        assert guests.seats == {"a": 0, "b": 1, "c": 1}
        await guests.go("b")
        await turns()
        assert not leaving.done()
        await guests.go("a")
        await leaving
        await guests.come("d", 1)
        assert guests.seats["d"] == 1
        router.add_engine(0)
        assert router.open_engines == {0, 1}
        await guests.come("e", 1)
        assert guests.seats["e"] == 0
        await guests.go("c", "d", "e")

    go(main())


def test_a_barred_engine_gets_nothing_and_keeps_what_it_has() -> None:
    async def main() -> None:
        router = Router(2)
        guests = Guests(router)
        await guests.come("a")
        router.close_engine(0)
        await guests.come("b")
        await guests.come("c")
        assert guests.seats == {"a": 0, "b": 1, "c": 1}
        assert running(router, 2) == [1, 2]
        await guests.leave_all()

    go(main())


def test_leaving_and_joining_may_be_repeated() -> None:
    async def main() -> None:
        router = Router(1)
        await router.drain(0)
        await router.drain(0)
        router.add_engine(0)
        router.add_engine(0)
        assert (await router.reserve(3)).engine == 0

    go(main())


def test_groups_wait_while_no_engine_is_open_and_all_run_when_one_joins() -> None:
    async def main() -> None:
        router = Router(2)
        guests = Guests(router)
        await router.drain(0)
        await router.drain(1)
        for name in "abc":
            await guests.come(name, 5)
        assert guests.seats == {}
        router.add_engine(1)
        await turns()
        assert guests.seats == dict.fromkeys("abc", 1)
        await guests.go("a", "b", "c")

    go(main())


def test_a_group_that_waits_for_an_engine_can_be_cancelled() -> None:
    async def main() -> None:
        router = Router(1)
        guests = Guests(router)
        await router.drain(0)
        await guests.come("a", 5)
        guests.tasks["a"].cancel()
        with pytest.raises(asyncio.CancelledError):
            await guests.tasks["a"]
        router.add_engine(0)
        await turns()
        assert guests.seats == {}
        assert running(router, 1) == [0]

    go(main())


def test_a_dead_engine_gets_no_groups_and_has_no_reserved_slots() -> None:
    async def main() -> None:
        router = Router(2)
        guests = Guests(router)
        await guests.come("a", 3)
        await guests.come("b", 9)
        leaving = asyncio.create_task(router.drain(0))
        router.mark_dead(0)
        await leaving  # what it had is no longer its own
        assert (router.open_engines, running(router, 2)) == ({1}, [0, 9])
        await guests.come("c", 1)
        assert guests.seats["c"] == 1
        router.add_engine(0)
        await guests.come("d", 2)
        assert guests.seats["d"] == 0
        await guests.go("a")  # its place was that of the engine's earlier life
        assert running(router, 2) == [2, 10]
        await guests.leave_all()
        assert running(router, 2) == [0, 0]

    go(main())


def test_the_cache_of_a_dead_engine_is_forgotten() -> None:
    async def main() -> None:
        router = Router(2, kv_tokens=1000, expected_tokens=10)
        await router.reserve(2)
        router.report(0, 900)
        router.mark_dead(0)
        router.add_engine(0)
        assert (await router.reserve(2)).engine == 0

    go(main())


def test_an_idle_engine_has_an_empty_cache_whatever_it_last_said() -> None:
    async def main() -> None:
        router = Router(2, kv_tokens=1000, expected_tokens=100)
        guests = Guests(router)
        await guests.come("a", 5)
        await guests.come("b", 5)
        router.report(0, 940)
        router.report(1, 900)
        await guests.go("a")
        await guests.come("c", 5)
        assert guests.seats == {"b": 1, "c": 0}
        await guests.leave_all()

    go(main())


def test_who_waits_hears_that_samples_are_shorter_than_expected() -> None:
    async def main() -> None:
        router = Router(1, kv_tokens=1000, expected_tokens=300)
        guests = Guests(router)
        await guests.come("a", 2)
        await guests.come("b", 2)
        assert router.waiting == 1
        for _ in range(200):
            router.observe_length(10)
        await turns()
        assert router.waiting == 0
        await guests.leave_all()

    go(main())


def test_engines_are_compared_by_what_is_expected_now() -> None:
    async def main() -> None:
        router = Router(2, kv_tokens=1000, expected_tokens=100)
        assert [(await router.reserve(n)).engine for n in (2, 3)] == [0, 1]
        for _ in range(1000):
            router.observe_length(10)
        assert [(await router.reserve(1)).engine for _ in range(5)] == [0, 0, 1, 0, 1]

    go(main())


STEPS = [
    "seat",
    "seat",
    "seat",
    "take",
    "free",
    "free",
    "part",
    "leave",
    "join",
    "lose",
    "hold",
    "release",
    "report",
    "learn",
]


@given(
    count=st.integers(1, 4),
    max_running=st.sampled_from([0, 1, 3, 8]),
    kv_tokens=st.sampled_from([0, 100]),
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 50)), max_size=50),
)
@settings(max_examples=examples(150), derandomize=True, deadline=None)
def test_any_coming_and_going_keeps_what_the_router_promises(
    count: int, max_running: int, kv_tokens: int, steps: list[tuple[str, int]]
) -> None:
    async def main() -> None:
        router = Router(count, max_running=max_running, kv_tokens=kv_tokens, expected_tokens=8)
        guests = Guests(router)
        groups: dict[str, int] = {}
        leaving: dict[int, asyncio.Task[None]] = {}
        lives = [0] * count
        expected, held = 8.0, False
        cached: list[Any] = [None] * count
        """Tokens an engine said, and the samples it got since."""

        def alive(name: str) -> bool:
            return guests.tickets[name].restart_count == lives[guests.tickets[name].engine]

        def samples(engine: int) -> int:
            return sum(t.samples for n, t in guests.tickets.items() if t.engine == engine and alive(n))

        def room(engine: int, wanted: int) -> bool:
            if not samples(engine):
                return True
            if max_running and samples(engine) >= max_running:
                return False
            if cached[engine] is None:
                load = samples(engine) * expected
            else:
                load = cached[engine][0] + min(cached[engine][1], samples(engine)) * expected
            return not kv_tokens or load + wanted * expected <= 0.95 * kv_tokens

        for number, (what, value) in enumerate(steps):
            engine, before = value % count, set(guests.tickets)
            had = [samples(e) for e in range(count)]
            if what == "seat":
                name = str(number)
                groups[name] = 1 + value % 5
                await guests.come(name, groups[name], priority=value % 2)
            elif what == "take" and engine not in leaving:
                name = str(number)
                groups[name], guests.tickets[name] = 1, router.reserve_on(engine)
                guests.tasks[name] = asyncio.create_task(turns(0))
            elif what == "free" and guests.tickets:
                await guests.go(sorted(guests.tickets)[value % len(guests.tickets)])
            elif what == "part" and guests.tickets:
                router.release(guests.tickets[sorted(guests.tickets)[value % len(guests.tickets)]], 1)
            elif what == "leave" and engine not in leaving:
                leaving[engine] = asyncio.create_task(router.drain(engine))
            elif what == "join" and (engine not in leaving or leaving[engine].done()):
                leaving.pop(engine, None)
                router.add_engine(engine)
            elif what == "lose":
                router.mark_dead(engine)
                leaving.setdefault(engine, asyncio.create_task(router.drain(engine)))
                lives[engine] += 1
                cached[engine] = None
            elif what in ("hold", "release"):
                held = what == "hold"
                router.pause_admission(held)
            elif what == "report":
                cached[engine] = [value, 0]
                router.report(engine, value)
            elif what == "learn":
                for _ in range(40):
                    router.observe_length(value)
                    expected += (value - expected) * 0.01
            await turns()
            for name in set(guests.tickets) - before:
                seat = guests.tickets[name].engine
                assert seat not in leaving
                if what == "seat" and name == str(number):
                    assert not max_running or had[seat] < max_running
                    if not kv_tokens and not any(cached):
                        assert had[seat] == min(had[e] for e in router.open_engines)
                if cached[seat] is not None:
                    cached[seat][1] += groups[name]
            for e in range(count):
                if cached[e] is not None:
                    cached[e][1] = min(cached[e][1], samples(e))
                    if not samples(e):
                        cached[e] = [0, 0]  # an idle engine has nothing in its cache
            assert running(router, count) == [samples(e) for e in range(count)]
            assert router.open_engines == set(range(count)) - set(leaving)
            for each, task in leaving.items():
                assert task.done() == (samples(each) == 0)
            assert router.waiting == len(guests.tasks) - len(guests.tickets)
            if held:
                assert set(guests.tickets) - before <= ({str(number)} if what == "take" else set())
            elif router.waiting:
                first = min(set(guests.tasks) - set(guests.tickets), key=lambda n: (-(value_of(steps, n) % 2), int(n)))
                assert not any(room(e, groups[first]) for e in router.open_engines)
        router.pause_admission(False)
        for each in range(count):
            router.add_engine(each)
        await turns()
        await guests.leave_all()
        await asyncio.gather(*leaving.values())
        assert running(router, count) == [0] * count

    go(main())


def value_of(steps: list[tuple[str, int]], name: str) -> int:
    return steps[int(name)][1]
