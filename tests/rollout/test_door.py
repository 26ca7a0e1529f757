"""The door to the engines: what comes back to whom, and what happens when an engine or a caller dies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import ToyEngine, engines, go, request, turns, until

from roll.cluster import Cluster
from roll.engine.request import Completion, Request
from roll.rollout.door import EngineDoor, RequestRefused
from roll.workers.infer import InferWorker


def start(door: EngineDoor, id: str, engine: int = 0, new_tokens: int = 4) -> asyncio.Task[Completion]:
    return asyncio.create_task(door.generate(request(id, new_tokens=new_tokens), engine))


async def cancel(task: asyncio.Task[Completion]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def assert_empty(door: EngineDoor) -> None:
    assert not door._waiting
    assert not any(sum(forsaken.values()) for forsaken in door._forsaken)


class Counted:
    """Counts the calls on a role's workers."""

    def __init__(self, cluster: Cluster[InferWorker]) -> None:
        self.calls: list[tuple[str, int]] = []
        for handle in cluster._handles:
            handle.call = self._counting(handle.call)  # type: ignore[method-assign]

    def _counting(self, call):  # type: ignore[no-untyped-def]
        async def counted(method: str, args: Sequence, kwargs: dict):  # type: ignore[no-untyped-def,type-arg]
            self.calls.append((method, len(args[-1])))
            return await call(method, args, kwargs)

        return counted


# every request has its own answer


@given(
    count=st.integers(1, 3),
    doors=st.integers(1, 3),
    arrivals=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=60, derandomize=True, deadline=None)
def test_every_request_gets_its_own_completion_in_any_order(
    count: int, doors: int, arrivals: list[int], order: object
) -> None:
    async def main() -> None:
        cluster, toys = await engines(count)
        clients = [EngineDoor(cluster, f"client {number}") for number in range(doors)]
        calls = []
        for number, pause in enumerate(arrivals):
            calls.append(start(clients[number % doors], str(number), number // 2 % count))
            await turns(pause)
        await until(lambda: sum(len(toy.running) for toy in toys) == len(arrivals))
        running = [(toy, name) for toy in toys for name in toy.running]
        order.shuffle(running)  # type: ignore[attr-defined]
        for toy, name in running:
            toy.finish(name, [int(name)])
            await turns(int(name) % 3)
        for number, call in enumerate(calls):
            done = await call
            assert (done.id, done.ids.tolist()) == (str(number), [number])
        for client in clients:
            assert_empty(client)

    go(main())


def test_requests_made_together_travel_together() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        counted = Counted(cluster)
        door = EngineDoor(cluster, "me")
        calls = [start(door, str(number)) for number in range(50)]
        await until(lambda: len(toy.running) == 50)
        assert [call for call in counted.calls if call[0] == "submit"] == [("submit", 50)]
        for number in range(50):
            toy.finish(str(number))
        await asyncio.gather(*calls)
        assert sum(method == "results" for method, _ in counted.calls) <= 3

    go(main())


def test_clients_of_one_engine_get_nothing_of_each_others() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        mine, yours = EngineDoor(cluster, "me"), EngineDoor(cluster, "you")
        first, second = start(mine, "a"), start(yours, "b")
        await until(lambda: len(toy.running) == 2)
        toy.finish("b", [2])
        assert (await second).ids.tolist() == [2]
        await turns()
        assert not first.done()
        toy.finish("a", [1])
        assert (await first).ids.tolist() == [1]

    go(main())


def test_completions_wait_for_a_client_that_has_not_asked_yet() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        assert await cluster.call_rank(0, InferWorker.submit, "me", [request("a"), request("b")]) == []
        toy.finish("b")
        toy.finish("a")
        await turns()
        assert [c.id for c in await cluster.call_rank(0, InferWorker.results, "me")] == ["b", "a"]
        assert await cluster.call_rank(0, InferWorker.results, "me") == []
        assert await cluster.call_rank(0, InferWorker.results, "you") == []

    go(main())


def test_an_id_can_wait_once_only() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        door = EngineDoor(cluster, "me")
        call = start(door, "a")
        await turns()
        with pytest.raises(ValueError, match="'a' is being generated already"):
            await door.generate(request("a"), 0)
        toy.finish("a")
        assert (await call).id == "a"

    go(main())


def test_results_nobody_asked_for_are_ignored() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        door = EngineDoor(cluster, "me")
        call = start(door, "a")
        await turns()
        toy.finish("stranger")
        await turns()
        assert not call.done()
        toy.finish("a", [1])
        toy.finish("a", [2])
        assert (await call).ids.tolist() == [1]
        later = start(door, "b")
        await turns()
        toy.finish("b")
        assert (await later).id == "b"
        assert_empty(door)

    go(main())


# refusals


def test_a_refused_request_is_refused_to_its_caller_alone() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        toy.context = 10
        door, other = EngineDoor(cluster, "me"), EngineDoor(cluster, "you")
        calls = [start(door, "short"), start(door, "long", new_tokens=20), start(door, "brief"), start(other, "own")]
        with pytest.raises(RequestRefused, match="request 'long' is too long"):
            await calls.pop(1)
        await until(lambda: len(toy.running) == 3)
        for name in ("own", "brief", "short"):
            toy.finish(name)
        assert [(await call).id for call in calls] == ["short", "brief", "own"]
        assert_empty(door)

    go(main())


def test_an_engine_that_refuses_everything_has_nothing_to_wait_for() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        toy.context = 0
        with pytest.raises(RequestRefused):
            await EngineDoor(cluster, "me").generate(request("a"), 0)

    go(main())


# cancelling


@pytest.mark.parametrize("after", range(8))
def test_a_cancelled_request_is_on_no_engine_whenever_it_is_cancelled(after: int) -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        door = EngineDoor(cluster, "me")
        call, other = start(door, "a"), start(door, "b")
        await turns(after)
        await cancel(call)
        await until(lambda: "b" in toy.running)
        assert list(toy.running) == ["b"]
        assert toy.aborted == (["a"] if "a" in toy.submitted else [])
        again = start(door, "a")
        await until(lambda: "a" in toy.running)
        toy.finish("a", [5])
        toy.finish("b", [6])
        assert (await again).ids.tolist() == [5]
        assert (await other).ids.tolist() == [6]
        assert_empty(door)

    go(main())


def test_a_request_cancelled_on_its_way_is_aborted_when_it_has_arrived() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        slow = Slow(cluster)
        door = EngineDoor(cluster, "me")
        call = start(door, "a")
        await until(lambda: slow.held)
        call.cancel()
        await turns()
        assert (toy.aborted, call.done()) == ([], False)
        slow.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (toy.submitted, toy.aborted, toy.running) == (["a"], ["a"], {})
        again = start(door, "a")
        await until(lambda: toy.running)
        toy.finish("a", [5])
        assert (await again).ids.tolist() == [5]
        assert_empty(door)

    go(main())


class Slow:
    """Holds requests back on their way to the engine while its gate is closed."""

    def __init__(self, cluster: Cluster[InferWorker], error: Exception | None = None) -> None:
        self.gate = asyncio.Event()
        self.held = 0
        (handle,) = cluster._handles
        call = handle.call

        async def slow(method: str, args: Sequence, kwargs: dict):  # type: ignore[no-untyped-def,type-arg]
            if method == "submit":
                self.held += 1
                await self.gate.wait()
                if error is not None:
                    raise error
            return await call(method, args, kwargs)

        handle.call = slow  # type: ignore[method-assign]


def test_a_deadline_ends_the_request_on_its_engine_too() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await EngineDoor(cluster, "me").generate(request("a"), 0)
        assert toy.aborted == ["a"]
        assert not toy.running

    go(main())


def test_a_request_tried_again_at_once_gets_its_own_answer() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        door = EngineDoor(cluster, "me")

        async def try_twice() -> Completion:
            try:
                async with asyncio.timeout(0.01):
                    return await door.generate(request("a"), 0)
            except TimeoutError:
                return await door.generate(request("a"), 0)

        answer = asyncio.create_task(try_twice())
        await until(lambda: toy.aborted and toy.running)
        toy.finish("a", [5])
        assert (await answer).ids.tolist() == [5]

    go(main())


def test_a_second_try_that_arrives_before_the_first_ones_end_was_told_gets_its_own_answer() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        await cluster.call_rank(0, InferWorker.submit, "me", [request("a")])
        await turns()
        toy.abort(["a"])  # in one turn of the engine's loop, so that nobody hears of it in between
        again = cluster._handles[0]._worker.submit("me", [request("a")])  # type: ignore[attr-defined]
        assert again == []
        await turns()
        toy.finish("a", [5])
        await turns()
        found = await cluster.call_rank(0, InferWorker.results, "me")
        assert [(c.finish, c.ids.tolist()) for c in found] == [("abort", []), ("stop", [5])]

    go(main())


def test_a_completion_that_comes_with_the_cancellation_is_not_waited_for_again() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        door = EngineDoor(cluster, "me")
        for pause in range(8):
            call = start(door, "a")
            await until(lambda: toy.running)
            toy.finish("a", [1])
            await turns(pause)
            if call.done():
                break
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            again = start(door, "a")
            await until(lambda: toy.running)
            toy.finish("a", [2])
            assert (await again).ids.tolist() == [2], pause
            assert_empty(door)
        assert pause > 1

    go(main())


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["ask", "ask", "cancel", "finish", "finish"]), st.integers(0, 3), st.integers(0, 4)),
        max_size=40,
    )
)
@settings(max_examples=80, derandomize=True, deadline=None)
def test_any_asking_and_cancelling_gives_each_try_its_own_answer(steps: list[tuple[str, int, int]]) -> None:
    async def main() -> None:
        cluster, toys = await engines(2)
        door = EngineDoor(cluster, "me")
        calls: dict[str, asyncio.Task[Completion]] = {}
        tries: dict[str, int] = {}
        number = 0

        def finish(name: str) -> None:
            for toy in toys:
                if name in toy.running:
                    toy.finish(name, [tries[name]])

        for what, which, pause in steps:
            name = f"r{which}"
            if what == "ask" and name not in calls:
                number += 1
                tries[name] = number
                calls[name] = start(door, name, which % 2)
            elif what == "cancel" and name in calls:
                call = calls.pop(name)
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
            elif what == "finish":
                finish(name)
            await turns(pause)
            for done in [name for name, call in calls.items() if call.done()]:
                assert calls.pop(done).result().ids.tolist() == [tries[done]]
        while calls:
            for name in list(calls):
                finish(name)
                await turns()
                if calls[name].done():
                    assert calls.pop(name).result().ids.tolist() == [tries[name]]
        await turns(20)
        assert not any(toy.running for toy in toys)
        assert not door._waiting

    go(main())


# errors


def test_an_engines_error_reaches_everyone_who_waits_for_it_and_nobody_else() -> None:
    async def main() -> None:
        cluster, toys = await engines(2)
        mine, yours = EngineDoor(cluster, "me"), EngineDoor(cluster, "you")
        calls = {name: start(mine if name in "ab" else yours, name, "abcd".index(name) % 2) for name in "abcd"}
        await until(lambda: [sorted(toy.running) for toy in toys] == [["a", "c"], ["b", "d"]])
        toys[0].break_down(OSError("the engine died"))
        for name in "ac":
            with pytest.raises(OSError, match="the engine died"):
                await calls[name]
        assert not calls["b"].done()
        for name in "bd":
            toys[1].finish(name)
        assert ((await calls["b"]).id, (await calls["d"]).id) == ("b", "d")
        toys[0].mend()
        again = start(mine, "a")
        await turns()
        toys[0].finish("a")
        assert (await again).id == "a"

    go(main())


def test_an_error_waits_for_every_client_whose_requests_it_took() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        for client, id in (("me", "a"), ("you", "b"), ("you", "c")):
            await cluster.call_rank(0, InferWorker.submit, client, [request(id)])
        toy.finish("c")
        await turns()
        toy.break_down(OSError("the engine died"))
        await turns()
        toy.mend()
        await cluster.call_rank(0, InferWorker.submit, "me", [request("d")])  # the engine goes on
        await turns()
        for client in ("me", "you"):
            with pytest.raises(OSError, match="the engine died"):
                await cluster.call_rank(0, InferWorker.results, client)
        toy.finish("a")  # what the error took is nobody's
        toy.finish("d")
        assert [c.id for c in await cluster.call_rank(0, InferWorker.results, "me")] == ["d"]
        assert await cluster.call_rank(0, InferWorker.results, "you") == []

    go(main())


@pytest.mark.parametrize("cancelled", [False, True])
def test_requests_that_do_not_arrive_fail_and_can_be_tried_again(cancelled: bool) -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        (handle,) = cluster._handles
        call = handle.call
        slow = Slow(cluster, OSError("the engine died"))
        door = EngineDoor(cluster, "me")
        first, second = start(door, "a"), start(door, "b")
        await until(lambda: slow.held)
        third = start(door, "c")
        if cancelled:
            first.cancel()
            await turns()
        slow.gate.set()
        for failing in (first, second, third):
            with pytest.raises(asyncio.CancelledError if failing is first and cancelled else OSError):
                await failing
        assert slow.held == 1
        handle.call = call  # type: ignore[method-assign]
        again = start(door, "a")
        await until(lambda: toy.running)
        toy.finish("a", [5])
        assert (await again).ids.tolist() == [5]
        assert_empty(door)

    go(main())


def test_a_request_cancelled_before_its_engine_died_can_be_tried_again() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        door = EngineDoor(cluster, "me")
        first, second = start(door, "a"), start(door, "b")
        await until(lambda: len(toy.running) == 2)
        toy.abort = lambda ids: None  # type: ignore[method-assign]
        await cancel(first)
        toy.break_down(OSError("the engine died"))
        with pytest.raises(OSError, match="the engine died"):
            await second
        toy.mend()
        again = start(door, "a")
        await until(lambda: toy.running)
        toy.finish("a", [5])
        assert (await again).ids.tolist() == [5]

    go(main())


def test_what_an_engine_refuses_in_other_ways_is_its_error() -> None:
    class Unready(ToyEngine):
        def submit(self, requests: Sequence[Request]) -> None:
            raise LookupError("the engine has no weights yet")

    async def main() -> None:
        cluster, _ = await engines(1)
        cluster._handles[0]._worker._strategy = Unready()  # type: ignore[attr-defined]
        with pytest.raises(LookupError, match="no weights yet"):
            await EngineDoor(cluster, "me").generate(request("a"), 0)

    go(main())
