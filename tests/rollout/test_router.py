"""The router over toy engines: where requests go, what comes back, and what happens when an engine or a caller dies."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import engines, go, request, turns

from roll.engine.request import Completion
from roll.rollout.router import Router


def test_a_request_goes_to_the_engine_with_the_fewest_tokens_to_come() -> None:
    async def main() -> None:
        cluster, toys = await engines(3)
        router = Router(cluster)
        calls = {}
        for name, size in (("a", 10), ("b", 5), ("c", 1), ("d", 1), ("e", 9), ("f", 1)):
            calls[name] = asyncio.create_task(router.generate(request(name, prompt=1, new_tokens=size)))
            await turns()
        assert [list(toy.running) for toy in toys] == [["a"], ["b", "f"], ["c", "d", "e"]]
        toys[0].finish("a")
        await turns()
        calls["g"] = asyncio.create_task(router.generate(request("g", prompt=1, new_tokens=40)))
        await turns()
        assert list(toys[0].running) == ["g"]
        for toy in toys:
            for name in list(toy.running):
                toy.finish(name)
        for name, call in calls.items():
            assert (await call).id == name

    go(main())


@given(
    count=st.integers(1, 4),
    arrivals=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=40, derandomize=True, deadline=None)
def test_every_request_gets_its_own_completion_in_any_order(count: int, arrivals: list[int], order: object) -> None:
    async def main() -> None:
        cluster, toys = await engines(count)
        router = Router(cluster)
        calls: list[asyncio.Task[Completion]] = []
        for number, pause in enumerate(arrivals):
            calls.append(asyncio.create_task(router.generate(request(str(number), 1 + number % 3))))
            await turns(pause)
        await turns()
        running = [(toy, name) for toy in toys for name in toy.running]
        assert len(running) == len(arrivals)
        order.shuffle(running)  # type: ignore[attr-defined]
        for toy, name in running:
            toy.finish(name, [int(name)])
            await turns(int(name) % 3)
        for number, call in enumerate(calls):
            done = await call
            assert (done.id, done.ids.tolist()) == (str(number), [number])

    go(main())


def test_a_cancelled_request_is_aborted_on_its_engine_and_its_load_is_gone() -> None:
    async def main() -> None:
        cluster, toys = await engines(2)
        router = Router(cluster)
        first = asyncio.create_task(router.generate(request("a", new_tokens=100)))
        await turns()
        other = asyncio.create_task(router.generate(request("b", new_tokens=10)))
        await turns()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert (toys[0].aborted, toys[1].aborted) == (["a"], [])
        third = asyncio.create_task(router.generate(request("c")))
        await turns()
        assert list(toys[0].running) == ["c"]
        toys[0].finish("c")
        toys[1].finish("b")
        assert {(await other).id, (await third).id} == {"b", "c"}

    go(main())


def test_a_deadline_ends_the_request_on_its_engine_too() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await Router(cluster).generate(request("a"))
        assert toy.aborted == ["a"]
        assert not toy.running

    go(main())


def test_a_request_tried_again_at_once_gets_its_own_answer() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        router = Router(cluster)

        async def try_twice() -> Completion:
            try:
                async with asyncio.timeout(0.01):
                    return await router.generate(request("a"))
            except TimeoutError:
                return await router.generate(request("a"))

        answer = asyncio.create_task(try_twice())
        while not (toy.aborted and toy.running):
            await turns()
        toy.finish("a", [5])
        assert (await answer).ids.tolist() == [5]

    go(main())


def test_an_engines_error_reaches_everyone_who_waits_for_it_and_nobody_else() -> None:
    async def main() -> None:
        cluster, toys = await engines(2)
        router = Router(cluster)
        calls = []
        for name in "abcd":
            calls.append(asyncio.create_task(router.generate(request(name))))
            await turns()
        assert [list(toy.running) for toy in toys] == [["a", "c"], ["b", "d"]]
        toys[0].break_down(OSError("the engine died"))
        for index in (0, 2):
            with pytest.raises(OSError, match="the engine died"):
                await calls[index]
        assert not calls[1].done()
        for name in "bd":
            toys[1].finish(name)
        assert ((await calls[1]).id, (await calls[3]).id) == ("b", "d")
        toys[0].mend()
        again = asyncio.create_task(router.generate(request("a")))
        await turns()
        toys[0].finish("a")
        assert (await again).id == "a"

    go(main())


def test_results_nobody_asked_for_are_ignored() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        router = Router(cluster)
        call = asyncio.create_task(router.generate(request("a")))
        await turns()
        toy.finish("stranger")
        await turns()
        assert not call.done()
        toy.finish("a", [1])
        toy.finish("a", [2])
        assert (await call).ids.tolist() == [1]
        later = asyncio.create_task(router.generate(request("b")))
        await turns()
        toy.finish("b")
        assert (await later).id == "b"

    go(main())


def test_a_refused_request_is_refused_to_its_caller_and_costs_the_engine_nothing() -> None:
    async def main() -> None:
        cluster, toys = await engines(2)
        toys[0].context = 10
        router = Router(cluster)
        with pytest.raises(ValueError, match="'long' is too long"):
            await router.generate(request("long", new_tokens=20))
        call = asyncio.create_task(router.generate(request("short")))
        await turns()
        assert list(toys[0].running) == ["short"]
        toys[0].finish("short")
        await call

    go(main())


def test_an_id_can_wait_once_only() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        router = Router(cluster)
        call = asyncio.create_task(router.generate(request("a")))
        await turns()
        with pytest.raises(ValueError, match="'a' is being generated already"):
            await router.generate(request("a"))
        toy.finish("a")
        assert (await call).id == "a"

    go(main())
