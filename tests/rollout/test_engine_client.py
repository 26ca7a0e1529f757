"""The client of the engines: what comes back to whom, and what happens when an engine or a caller dies."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from rollout_toys import Mortal, ToyEngine, engines, go, logprob_of, of, request, some_time, timings, turns, until

from roll.cluster import Cluster
from roll.cluster.errors import CallFailure, RemoteError, WorkerDied, WorkerError
from roll.config.errors import RunError
from roll.engine.request import Completion, Progress, Request, RequestRejected
from roll.rollout.engine_client import EngineClient, EngineDied, PartialResponse, Watch
from roll.workers.infer import PROGRESS_S, InferWorker


def start(
    client: EngineClient, id: str, engine: int = 0, new_tokens: int = 4, watch: Watch | None = None
) -> asyncio.Task[Completion]:
    return asyncio.create_task(client.generate(request(id, new_tokens=new_tokens), engine, watch))


async def cancel(task: asyncio.Task[Completion]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def assert_empty(client: EngineClient) -> None:
    assert not client._pending
    assert not client._aborts


def ask(
    cluster: Cluster[InferWorker], client: str, id: str, heard: list[Progress] | None = None
) -> asyncio.Task[Completion]:
    """A request as the engine's worker gets it, from the client of that name."""
    report = (lambda progress: None) if heard is None else heard.append
    return asyncio.create_task(cluster.stream_rank(0, InferWorker.generate, report, f"{client}#{id}", request(id)))


# every request has its own answer


@given(
    count=st.integers(1, 3),
    doors=st.integers(1, 3),
    arrivals=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=examples(60), derandomize=True, deadline=None)
def test_every_request_gets_its_own_completion_in_any_order(
    count: int, doors: int, arrivals: list[int], order: object
) -> None:
    async def main() -> None:
        cluster, toys = await engines(count)
        clients = [EngineClient(cluster, f"client {number}") for number in range(doors)]
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


def test_a_request_to_an_engine_in_this_process_is_there_at_once() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        client = EngineClient(cluster, "me")
        calls = [start(client, str(number)) for number in range(50)]
        await asyncio.sleep(0)
        assert len(toy.running) == 50
        for number in range(50):
            toy.finish(str(number))
        await asyncio.gather(*calls)
        assert_empty(client)

    go(main())


def test_clients_of_one_engine_get_nothing_of_each_others() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        mine, yours = EngineClient(cluster, "me"), EngineClient(cluster, "you")
        first, second = start(mine, "a"), start(yours, "b")
        await until(lambda: len(toy.running) == 2)
        toy.finish("b", [2])
        assert (await second).ids.tolist() == [2]
        await turns()
        assert not first.done()
        toy.finish("a", [1])
        assert (await first).ids.tolist() == [1]

    go(main())


def test_an_id_can_wait_once_only() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        client = EngineClient(cluster, "me")
        call = start(client, "a")
        await turns()
        with pytest.raises(ValueError, match="'a' is being generated already"):
            await client.generate(request("a"), 0)
        toy.finish("a")
        assert (await call).id == "a"

    go(main())


def test_results_nobody_asked_for_are_ignored() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        client = EngineClient(cluster, "me")
        call = start(client, "a")
        await turns()
        toy.finish("stranger")
        await turns()
        assert not call.done()
        toy.finish("a", [1])
        toy.finish("a", [2])
        assert (await call).ids.tolist() == [1]
        later = start(client, "b")
        await turns()
        toy.finish("b")
        assert (await later).id == "b"
        assert_empty(client)

    go(main())


# refusals


def test_a_refused_request_is_refused_to_its_caller_alone() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        toy.context = 10
        client, other = EngineClient(cluster, "me"), EngineClient(cluster, "you")
        calls = [
            start(client, "short"),
            start(client, "long", new_tokens=20),
            start(client, "brief"),
            start(other, "own"),
        ]
        with pytest.raises(RequestRejected, match="request 'long' is too long"):
            await calls.pop(1)
        await until(lambda: len(toy.running) == 3)
        for name in ("own", "brief", "short"):
            toy.finish(name)
        assert [(await call).id for call in calls] == ["short", "brief", "own"]
        assert_empty(client)

    go(main())


def test_an_engine_that_refuses_everything_has_nothing_to_wait_for() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        toy.context = 0
        with pytest.raises(RequestRejected):
            await EngineClient(cluster, "me").generate(request("a"), 0)

    go(main())


# cancelling


@pytest.mark.parametrize("after", range(8))
def test_a_cancelled_request_is_on_no_engine_whenever_it_is_cancelled(after: int) -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        client = EngineClient(cluster, "me")
        call, other = start(client, "a"), start(client, "b")
        await turns(after)
        await cancel(call)
        await until(lambda: "b" in toy.running)
        assert list(toy.running) == ["b"]
        assert toy.aborted == (["a"] if "a" in toy.submitted else [])
        again = start(client, "a")
        await until(lambda: "a" in toy.running)
        toy.finish("a", [5])
        toy.finish("b", [6])
        assert (await again).ids.tolist() == [5]
        assert (await other).ids.tolist() == [6]
        assert_empty(client)

    go(main())


class Slow:
    """Holds what goes to the engine back while its gate is closed; requests then end in `error`, if there is one."""

    def __init__(self, cluster: Cluster[InferWorker], error: Exception | None = None) -> None:
        self.gate = asyncio.Event()
        self.held = 0
        (handle,) = cluster._handles
        call, stream = handle.call, handle.stream

        async def slow_call(*args):  # type: ignore[no-untyped-def]
            await self.gate.wait()
            return await call(*args)

        async def slow_stream(*args):  # type: ignore[no-untyped-def]
            self.held += 1
            await self.gate.wait()
            if error is not None:
                raise error
            return await stream(*args)

        handle.call, handle.stream = slow_call, slow_stream  # type: ignore[method-assign]


def test_a_deadline_ends_the_request_on_its_engine_too() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await EngineClient(cluster, "me").generate(request("a"), 0)
        assert toy.aborted == ["a"]
        assert not toy.running

    go(main())


def test_a_request_tried_again_at_once_gets_its_own_answer() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        client = EngineClient(cluster, "me")

        async def try_twice() -> Completion:
            try:
                async with asyncio.timeout(0.01):
                    return await client.generate(request("a"), 0)
            except TimeoutError:
                return await client.generate(request("a"), 0)

        answer = asyncio.create_task(try_twice())
        await until(lambda: toy.aborted and toy.running)
        toy.finish("a", [5])
        assert (await answer).ids.tolist() == [5]

    go(main())


def test_a_second_try_that_arrives_before_the_first_ones_end_was_told_gets_its_own_answer() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        first = ask(cluster, "me", "a")
        await turns()
        await cluster.call_rank(0, InferWorker.abort, ["me#a"])
        again = ask(cluster, "you", "a")  # in one turn of the engine's loop, so that nobody hears of the end in between
        await turns()
        toy.finish("a", [5])
        assert [(c.finish, c.ids.tolist()) for c in (await first, await again)] == [("abort", []), ("stop", [5])]

    go(main())


def test_a_completion_that_comes_with_the_cancellation_is_not_waited_for_again() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        client = EngineClient(cluster, "me")
        for pause in range(8):
            call = start(client, "a")
            await until(lambda: toy.running)
            toy.finish("a", [1])
            await turns(pause)
            if call.done():
                break
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            again = start(client, "a")
            await until(lambda: toy.running)
            toy.finish("a", [2])
            assert (await again).ids.tolist() == [2], pause
            assert_empty(client)
        assert pause > 1

    go(main())


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["ask", "ask", "cancel", "finish", "finish"]), st.integers(0, 3), st.integers(0, 4)),
        max_size=40,
    )
)
@settings(max_examples=examples(80), derandomize=True, deadline=None)
def test_any_asking_and_cancelling_gives_each_try_its_own_answer(steps: list[tuple[str, int, int]]) -> None:
    async def main() -> None:
        cluster, toys = await engines(2)
        client = EngineClient(cluster, "me")
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
                calls[name] = start(client, name, which % 2)
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
        assert not client._pending

    go(main())


# errors


def test_an_engines_error_reaches_everyone_who_waits_for_it_and_nobody_else() -> None:
    async def main() -> None:
        cluster, toys = await engines(2)
        mine, yours = EngineClient(cluster, "me"), EngineClient(cluster, "you")
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


def test_what_an_error_took_is_nobodys_and_the_engine_goes_on() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        client = EngineClient(cluster, "me")
        taken = [start(client, id) for id in "ab"]
        await turns()
        toy.break_down(OSError("the engine died"))
        for call in taken:
            with pytest.raises(OSError, match="the engine died"):
                await call
        toy.mend()
        later = start(client, "d")
        await turns()
        toy.finish("a")
        toy.finish("d", [4])
        assert (await later).ids.tolist() == [4]
        assert_empty(client)

    go(main())


@pytest.mark.parametrize("cancelled", [False, True])
def test_requests_that_do_not_arrive_fail_and_can_be_tried_again(cancelled: bool) -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        (handle,) = cluster._handles
        stream = handle.stream
        slow = Slow(cluster, OSError("the engine died"))
        client = EngineClient(cluster, "me")
        first, second = start(client, "a"), start(client, "b")
        await until(lambda: slow.held)
        third = start(client, "c")
        if cancelled:
            first.cancel()
            await turns()
        slow.gate.set()
        for failing in (first, second, third):
            with pytest.raises(asyncio.CancelledError if failing is first and cancelled else OSError):
                await failing
        assert slow.held == 3
        handle.stream = stream  # type: ignore[method-assign]
        again = start(client, "a")
        await until(lambda: toy.running)
        toy.finish("a", [5])
        assert (await again).ids.tolist() == [5]
        assert_empty(client)

    go(main())


def test_a_request_cancelled_before_its_engine_died_can_be_tried_again() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        client = EngineClient(cluster, "me")
        first, second = start(client, "a"), start(client, "b")
        await until(lambda: len(toy.running) == 2)
        toy.abort = lambda ids: None  # type: ignore[method-assign]
        await cancel(first)
        toy.break_down(OSError("the engine died"))
        with pytest.raises(OSError, match="the engine died"):
            await second
        toy.mend()
        again = start(client, "a")
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
            await EngineClient(cluster, "me").generate(request("a"), 0)

    go(main())


# what an engine says on the way, and its death


async def mortal(count: int = 1) -> tuple[list[Mortal], list[ToyEngine], EngineClient]:
    """Engines that can be killed."""
    cluster, toys = await engines(count)
    handles = [Mortal(handle) for handle in cluster._handles]
    return handles, toys, EngineClient(of("toys", handles), "me")


def kill(handle: Mortal) -> None:
    handle.kill()
    for task in handle.worker._tasks.values():
        task.cancel()


async def lost(call: asyncio.Task[Completion]) -> EngineDied:
    with pytest.raises(EngineDied) as caught:
        await call
    return caught.value


def test_who_loses_an_engine_has_what_it_had_said_until_then() -> None:
    async def main() -> None:
        (handle,), (toy,), client = await mortal()
        call, other = start(client, "a"), start(client, "b")
        await until(lambda: len(toy.running) == 2)
        toy.draw("a", 11, 12)
        await asyncio.sleep(PROGRESS_S + 0.1)
        toy.version = 4
        toy.draw("a", 13)
        await asyncio.sleep(PROGRESS_S + 0.1)
        toy.draw("a", 14)  # nobody hears of it any more
        kill(handle)
        end = await lost(call)
        assert isinstance(end.cause, WorkerDied)
        assert end.cause.worker == "toys[0]"
        assert end.partial.tokens == 3
        assert end.partial.ids.tolist() == [11, 12, 13]
        assert end.partial.logprobs.tolist() == [logprob_of(token) for token in (11, 12, 13)]
        assert end.partial.versions.tolist() == [3, 3, 4]
        assert (await lost(other)).partial.tokens == 0
        assert_empty(client)

    go(main())


def test_an_error_of_a_remote_engine_is_its_loss_and_of_one_in_this_process_an_error() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        client = EngineClient(cluster, "me")
        failure = CallFailure.of(ValueError("out of memory"), "toys[0]", "results", "process 3")
        for error, kind in ((WorkerError(failure), EngineDied), (OSError("no"), OSError), (RunError("no"), RunError)):
            call = start(client, "a")
            await until(lambda: toy.running)
            toy.break_down(error)
            with pytest.raises(kind) as caught:
                await call
            assert caught.type is kind
            toy.mend()

    go(main())


@given(seed=st.integers(0, 10**6), requests=st.integers(1, 3))
@timings(80)
def test_what_is_heard_of_a_request_is_always_a_beginning_of_what_was_drawn(seed: int, requests: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        (handle,), (toy,), client = await mortal()
        calls = {str(n): start(client, str(n), new_tokens=100) for n in range(requests)}
        said: dict[str, list[int]] = {name: [] for name in calls}
        finished: set[str] = set()
        for _ in range(rng.randrange(12)):
            for name in list(toy.running):
                if rng.random() < 0.1:
                    toy.finish(name, [99])
                    finished.add(name)
                else:
                    said[name].append(rng.randrange(10, 60))
                    toy.draw(name, said[name][-1])
            toy.version += rng.random() < 0.2
            await some_time(rng)
        kill(handle)
        for name, call in calls.items():
            try:
                whole = await call
                assert (name in finished, whole.ids.tolist()) == (True, [*said[name], 99])
            except EngineDied as end:
                drawn = end.partial
                assert drawn.tokens == len(drawn.ids) == len(drawn.logprobs) == len(drawn.versions)
                assert drawn.ids.tolist() == said[name][: drawn.tokens]
                assert drawn.logprobs.tolist() == [logprob_of(token) for token in said[name][: drawn.tokens]]
                assert sorted(drawn.versions.tolist()) == drawn.versions.tolist()
        assert_empty(client)

    go(main())


def test_progress_of_an_aborted_request_is_not_taken_for_the_next_ones() -> None:
    async def main() -> None:
        (handle,), (toy,), client = await mortal()
        first = start(client, "a")
        await until(lambda: toy.running)
        toy.draw("a", 11, 12)
        await cancel(first)
        again = start(client, "a")  # before the end of the first one was told
        await turns()
        toy.draw("a", 21, 22)
        await asyncio.sleep(PROGRESS_S + 0.1)
        toy.draw("a", 23)
        await asyncio.sleep(PROGRESS_S + 0.1)
        kill(handle)
        assert (await lost(again)).partial.ids.tolist() == [21, 22, 23]

    go(main())


def progress(id: str, start: int, *tokens: int) -> Progress:
    none = np.zeros(len(tokens), np.int32)
    return Progress(id, start, np.array(tokens, np.int32), none.astype(np.float32), none)


def test_only_what_is_new_is_told_each_time() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        heard: list[Progress] = []
        first, second = ask(cluster, "me", "a", heard), ask(cluster, "me", "b", heard)
        await turns()

        async def listen() -> list[tuple[str, int, list[int]]]:
            heard.clear()
            await asyncio.sleep(PROGRESS_S)
            return [(p.id, p.start, p.ids.tolist()) for p in heard]

        await asyncio.sleep(0.1)
        toy.draw("a", 11, 12)
        assert await listen() == [("a", 0, [11, 12])]
        toy.draw("b", 31)
        toy.draw("a", 13)
        assert await listen() == [("a", 2, [13]), ("b", 0, [31])]
        assert await listen() == []
        toy.finish("a", [14])
        toy.finish("b", [])
        assert [c.ids.tolist() for c in (await first, await second)] == [[11, 12, 13, 14], [31]]
        again = ask(cluster, "me", "a", heard)  # from its beginning
        await turns()
        toy.draw("a", 15)
        assert await listen() == [("a", 0, [15])]
        toy.finish("a")
        await again

    go(main())


def test_a_cancelled_request_of_a_dead_engine_ends_and_a_new_engine_takes_its_place() -> None:
    async def main() -> None:
        (handle,), _, client = await mortal()
        call, other = start(client, "a"), start(client, "b")
        await turns(20)
        kill(handle)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await lost(other)
        cluster, (toy,) = await engines(1)
        client.reconnect(cluster)
        again = start(client, "a")
        await until(lambda: toy.running)
        toy.finish("a", [5])
        assert (await again).ids.tolist() == [5]
        assert_empty(client)

    go(main())


def test_a_request_that_is_here_already_is_a_leftover_and_gives_way() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        calls = []
        for client in ("me", "you", "them"):
            calls.append(ask(cluster, client, "a"))
            await turns()
            toy.draw("a", 11)
        toy.finish("a", [5])
        done = [await call for call in calls]
        assert [(c.finish, c.ids.tolist()) for c in done] == [("abort", [11]), ("abort", [11]), ("stop", [11, 5])]
        assert toy.aborted == ["a", "a"]

    go(main())


def test_the_requests_of_clients_that_died_end() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        pairs = (("rollout[1]/ab", "a"), ("rollout[1]/cd", "b"), ("rollout[10]/ef", "c"))
        calls = {id: ask(cluster, client, id) for client, id in pairs}
        await turns()
        for id in calls:
            toy.draw(id, 11)
        await cluster.call(InferWorker.drop_clients, "rollout[1]/")
        assert (sorted(toy.aborted), list(toy.running)) == (["a", "b"], ["c"])
        await turns()
        toy.finish("c", [5])
        assert [(await call).finish for call in calls.values()] == ["abort", "abort", "stop"]

    go(main())


# ending requests


@pytest.mark.parametrize("after", range(12))
def test_a_request_that_is_ended_gives_what_it_has_whenever_that_is(after: int) -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        client = EngineClient(cluster, "me")
        call, other = start(client, "a"), start(client, "b")
        await turns(after)
        if "a" in toy.running:
            toy.draw("a", 11, 12)
        client.end(["a", "unknown"])
        client.end(["a"])
        if after == 0:
            assert not client.has("a")  # it was not there yet: nothing of it was ended
            await until(lambda: "a" in toy.running)
            toy.finish("a", [11], "abort")
        done = await call
        assert done.finish == "abort"
        assert done.ids.tolist() in ([], [11], [11, 12])
        await until(lambda: "b" in toy.running)
        assert list(toy.running) == ["b"]
        assert toy.aborted in ([], ["a"])
        toy.finish("b", [6])
        assert (await other).ids.tolist() == [6]
        assert_empty(client)

    go(main())


def test_a_response_that_ends_by_itself_in_time_is_whole() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        client = EngineClient(cluster, "me")
        call = start(client, "a")
        await until(lambda: toy.running)
        toy.finish("a", [1, 2])
        client.end(["a"])
        done = await call
        assert (done.finish, done.ids.tolist()) == ("stop", [1, 2])
        assert_empty(client)

    go(main())


@pytest.mark.parametrize("after", range(6))
def test_a_request_cancelled_and_ended_at_once_is_cancelled(after: int) -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        client = EngineClient(cluster, "me")
        call = start(client, "a")
        await turns(after)
        call.cancel()
        client.end(["a"])
        with pytest.raises(asyncio.CancelledError):
            await call
        await turns(20)
        assert not toy.running
        assert not client._pending

    go(main())


def test_the_end_of_one_turn_does_not_end_the_next() -> None:
    """A conversation's turns have the same id: an end that comes too late for one must not meet the one after it."""

    async def main() -> None:
        cluster, (toy,) = await engines(1)
        (handle,) = cluster._handles
        call, gate = handle.call, asyncio.Event()

        async def slow(method: str, args: Sequence, kwargs: dict):  # type: ignore[no-untyped-def,type-arg]
            if method == "abort":
                await gate.wait()
            return await call(method, args, kwargs)

        handle.call = slow  # type: ignore[method-assign]
        client = EngineClient(cluster, "me")
        first = start(client, "a")
        await until(lambda: toy.running)
        client.end(["a"])
        toy.finish("a", [1])
        assert (await first).finish == "stop"
        second = start(client, "a")
        await asyncio.sleep(1)
        gate.set()
        await asyncio.sleep(1)
        assert not second.done()
        toy.finish("a", [2])
        assert (await second).finish == "stop"

    go(main())


# watching


def test_a_watch_sees_the_response_grow_and_may_end_it() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        client = EngineClient(cluster, "me")
        seen: list[list[int]] = []

        def watch(drawn: PartialResponse) -> bool:
            seen.append(drawn.ids.tolist())
            return drawn.tokens >= 3

        call = start(client, "a", watch=watch)
        unwatched = start(client, "b")
        await until(lambda: len(toy.running) == 2)
        for token in (11, 12, 13):
            toy.draw("a", token)
            toy.draw("b", token)
            await asyncio.sleep(PROGRESS_S)
        done = await call
        assert seen == [[11], [11, 12], [11, 12, 13]]
        assert (done.finish, done.ids.tolist(), toy.aborted) == ("abort", [11, 12, 13], ["a"])
        assert not unwatched.done()
        toy.finish("b")
        await unwatched
        assert_empty(client)

    go(main())


def test_a_response_that_is_being_ended_is_not_watched_any_more() -> None:
    async def main() -> None:
        cluster, (toy,) = await engines(1)
        toy.abort = lambda ids: toy.aborted.extend(ids)  # type: ignore[method-assign]
        client, seen = EngineClient(cluster, "me"), []
        call = start(client, "a", watch=lambda drawn: bool(seen.append(drawn.tokens)) or True)  # type: ignore[func-returns-value]
        await until(lambda: toy.running)
        for token in range(10, 14):
            toy.draw("a", token)
            await asyncio.sleep(PROGRESS_S)
        assert (seen, toy.aborted) == ([1], ["a"])
        toy.finish("a", [], "abort")
        await call

    go(main())


def test_a_watch_that_fails_is_an_error_of_the_run() -> None:
    def watch(drawn: PartialResponse) -> bool:
        raise RunError("the early end failed")

    async def main() -> None:
        cluster, (toy,) = await engines(1)
        call = start(EngineClient(cluster, "me"), "a", watch=watch)
        await until(lambda: toy.running)
        toy.draw("a", 11)
        with pytest.raises(RunError, match="the early end failed"):
            await call
        toy.finish("a")

    go(main())


def test_pieces_of_a_response_are_joined_in_order() -> None:
    drawn = PartialResponse()
    assert (drawn.tokens, drawn.ids.dtype, drawn.logprobs.dtype) == (0, np.int32, np.float32)
    drawn.add(progress("a", 0, 11, 12))
    drawn.add(progress("a", 2))
    other = PartialResponse()
    other.add(progress("a", 0, 13))
    drawn.extend(other)
    assert (drawn.tokens, drawn.ids.tolist(), len(drawn.pieces)) == (3, [11, 12, 13], 2)
    assert drawn.after(np.array([1, 2], np.int32)).tolist() == [1, 2, 11, 12, 13]
    assert isinstance(EngineDied(WorkerDied("e", "x"), drawn).cause, RemoteError)
