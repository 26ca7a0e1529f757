"""The router: which engine a group gets, and how engines leave and join while groups come and go."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import go, turns

from roll.config.errors import RunError
from roll.rollout.router import Router


class Guests:
    """Groups that sit with engines until they are told to go."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.seats: dict[str, int] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._gates: dict[str, asyncio.Event] = {}

    async def come(self, name: str, tokens: int) -> None:
        self._gates[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._sit(name, tokens))
        await turns(3)

    async def _sit(self, name: str, tokens: int) -> None:
        async with self.router.seat(tokens) as engine:
            self.seats[name] = engine
            try:
                await self._gates[name].wait()
            finally:
                del self.seats[name]

    async def go(self, *names: str) -> None:
        for name in names:
            self._gates[name].set()
            await self.tasks.pop(name)


def test_a_group_goes_to_the_engine_with_the_fewest_tokens_to_come() -> None:
    async def main() -> None:
        guests = Guests(Router(3))
        for name, tokens in (("a", 10), ("b", 5), ("c", 1), ("d", 1), ("e", 9), ("f", 1)):
            await guests.come(name, tokens)
        assert guests.seats == {"a": 0, "b": 1, "c": 2, "d": 2, "e": 2, "f": 1}
        await guests.go("a")
        await guests.come("g", 40)
        assert guests.seats["g"] == 0
        await guests.go(*"bcdefg")
        assert guests.router._loads == [0, 0, 0]

    go(main())


def test_a_seat_is_free_again_whatever_ends_the_group() -> None:
    async def main() -> None:
        guests = Guests(Router(2))
        await guests.come("a", 10)
        guests.tasks["a"].cancel()
        with pytest.raises(asyncio.CancelledError):
            await guests.tasks["a"]
        with pytest.raises(KeyError):
            async with guests.router.seat(7):
                raise KeyError
        assert guests.router._loads == [0, 0]

    go(main())


def test_an_engine_that_leaves_is_waited_for_and_gets_nothing() -> None:
    async def main() -> None:
        router = Router(2)
        guests = Guests(router)
        await guests.come("a", 1)
        await guests.come("b", 100)
        leaving = asyncio.create_task(router.leave(0))
        await turns()
        assert router.inside == {1}
        assert not leaving.done()
        await guests.come("c", 1)
        assert guests.seats == {"a": 0, "b": 1, "c": 1}
        await guests.go("b")
        await turns()
        assert not leaving.done()
        await guests.go("a")
        await leaving
        await guests.come("d", 1)
        assert guests.seats["d"] == 1
        router.join(0)
        assert router.inside == {0, 1}
        await guests.come("e", 1)
        assert guests.seats["e"] == 0
        await guests.go("c", "d", "e")

    go(main())


def test_leaving_and_joining_may_be_repeated() -> None:
    async def main() -> None:
        router = Router(1)
        await router.leave(0)
        await router.leave(0)
        router.join(0)
        router.join(0)
        async with router.seat(3) as engine:
            assert engine == 0

    go(main())


def test_groups_wait_while_no_engine_is_in_and_all_go_on_when_one_joins() -> None:
    async def main() -> None:
        router = Router(2)
        guests = Guests(router)
        await router.leave(0)
        await router.leave(1)
        for name in "abc":
            await guests.come(name, 5)
        assert guests.seats == {}
        router.join(1)
        await turns()
        assert guests.seats == dict.fromkeys("abc", 1)
        await guests.go("a", "b", "c")

    go(main())


def test_a_group_that_waits_for_an_engine_can_be_cancelled() -> None:
    async def main() -> None:
        router = Router(1)
        guests = Guests(router)
        await router.leave(0)
        await guests.come("a", 5)
        guests.tasks["a"].cancel()
        with pytest.raises(asyncio.CancelledError):
            await guests.tasks["a"]
        router.join(0)
        await turns()
        assert guests.seats == {}
        assert router._loads == [0]

    go(main())


def test_nobody_waits_for_ever() -> None:
    async def main() -> None:
        router = Router(2, deadline_s=0.02)
        async with router.seat(1) as engine:
            with pytest.raises(RunError, match=rf"engine {engine} has not finished its samples for 0\.02 s"):
                await router.leave(engine)
        await router.leave(1)
        with pytest.raises(RunError, match=r"no engine has joined for 0\.02 s"):
            async with router.seat(1):
                pass

    go(main())


STEPS = ["seat", "seat", "free", "leave", "join"]


@given(
    count=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 50)), max_size=40),
)
@settings(max_examples=80, derandomize=True, deadline=None)
def test_any_coming_and_going_keeps_what_the_router_promises(count: int, steps: list[tuple[str, int]]) -> None:
    async def main() -> None:
        router = Router(count)
        guests = Guests(router)
        tokens: dict[str, int] = {}
        leaving: dict[int, asyncio.Task[None]] = {}

        def loads() -> list[int]:
            return [sum(tokens[name] for name, seat in guests.seats.items() if seat == e) for e in range(count)]

        for number, (what, value) in enumerate(steps):
            before, inside = loads(), router.inside
            engine = value % count
            if what == "seat":
                name = str(number)
                tokens[name] = 1 + value
                await guests.come(name, 1 + value)
                assert (name in guests.seats) == bool(inside)
                if inside:
                    assert guests.seats[name] in inside
                    assert before[guests.seats[name]] == min(before[e] for e in inside)
            elif what == "free" and guests.seats:
                await guests.go(sorted(guests.seats)[value % len(guests.seats)])
            elif what == "leave" and engine not in leaving:
                leaving[engine] = asyncio.create_task(router.leave(engine))
            elif what == "join" and (engine not in leaving or leaving[engine].done()):
                leaving.pop(engine, None)
                router.join(engine)
            await turns()
            assert router._loads == loads()
            assert router.inside == set(range(count)) - set(leaving)
            for each, task in leaving.items():
                assert task.done() == (loads()[each] == 0)
            assert not router.inside or set(guests.seats) == set(guests.tasks)
        for each in range(count):
            router.join(each)
        await turns()
        await guests.go(*list(guests.tasks))
        await asyncio.gather(*leaving.values())
        assert router._loads == [0] * count

    go(main())


def test_ties_go_to_the_first_engine() -> None:
    async def main() -> None:
        router = Router(3)
        async with AsyncExitStack() as stack:
            seats = [await stack.enter_async_context(router.seat(4)) for _ in range(6)]
        assert seats == [0, 1, 2, 0, 1, 2]

    go(main())
