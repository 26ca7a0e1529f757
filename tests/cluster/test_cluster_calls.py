"""Calls on a role: how they reach its workers, how results come back, and what happens when something breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.cluster import Cluster, Dispatch, LocalExecutor, Worker, WorkerPlacement, dispatch
from roll.data import Batch
from roll.data.batch import Indices
from roll.data.tokenlog import FloatArray

T = TypeVar("T")


def join_tokens(results: Sequence[FloatArray], parts: Sequence[Indices], whole: Batch) -> FloatArray:
    joined = np.zeros(whole.tokens, np.float32)
    for result, part in zip(results, parts, strict=True):
        joined[whole.token_indices(part)] = result
    return joined


class Toy(Worker):
    """A worker that notes what it was called with."""

    def __init__(self, place: WorkerPlacement) -> None:
        super().__init__(place)
        self.calls: list[Any] = []

    @dispatch(Dispatch.ALL)
    def name(self, greeting: str, *, mark: str = "!") -> str:
        self.calls.append(greeting)
        return f"{greeting} {self.placement.name}{mark}"

    @dispatch(Dispatch.ONE)
    async def slow_name(self) -> str:
        await asyncio.sleep(0)
        self.calls.append("slow")
        return self.placement.name

    @dispatch(Dispatch.DATA, join=join_tokens)
    def scale(self, batch: Batch, factor: float) -> FloatArray:
        self.calls.append(batch["sample"].tolist())
        return (batch.ids * factor).astype(np.float32)

    @dispatch(Dispatch.DATA, join=lambda results, parts, whole: [str(part.tolist()) for part in parts])
    def either(self, first: Batch | int, second: Batch | int) -> None: ...

    @dispatch(Dispatch.ALL)
    async def fail(self, rank: int) -> None:
        self.calls.append("fail")
        await asyncio.sleep(0)
        if self.placement.rank == rank:
            raise KeyError(f"from {self.placement.name}")

    def private(self) -> None: ...


def places(count: int) -> list[WorkerPlacement]:
    return [WorkerPlacement("toy", rank, count) for rank in range(count)]


def with_toys(count: int, use: Callable[[Cluster[Toy], list[Toy]], Coroutine[Any, Any, T]]) -> T:
    async def main() -> T:
        workers: list[Toy] = []

        def make(place: WorkerPlacement) -> Toy:
            workers.append(Toy(place))
            return workers[-1]

        executor = LocalExecutor()
        try:
            return await asyncio.wait_for(use(await Cluster.start(executor, make, places(count)), workers), 20)
        finally:
            await executor.close()

    return asyncio.run(main())


def ragged(lengths: Sequence[int]) -> Batch:
    total = sum(lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    names = np.array([f"s{i}" for i in range(len(lengths))], np.str_)
    return Batch(offsets, {"sample": names, "ids": np.arange(total, dtype=np.int32)})


# dispatch


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_all_reaches_every_worker_and_gives_the_firsts_result(count: int) -> None:
    async def use(toys: Cluster[Toy], workers: list[Toy]) -> None:
        assert len(toys) == count
        assert toys.role == "toy"
        assert await toys.call(Toy.name, "hello", mark="?") == "hello toy[0]?"
        assert [worker.calls for worker in workers] == [["hello"]] * count

    with_toys(count, use)


@pytest.mark.parametrize("count", [1, 4])
def test_one_reaches_the_first_worker_alone(count: int) -> None:
    async def use(toys: Cluster[Toy], workers: list[Toy]) -> None:
        assert await toys.call(Toy.slow_name) == "toy[0]"
        assert [len(worker.calls) for worker in workers] == [1] + [0] * (count - 1)

    with_toys(count, use)


def test_a_call_on_a_rank_or_on_each() -> None:
    async def use(toys: Cluster[Toy], workers: list[Toy]) -> None:
        assert await toys.call_rank(2, Toy.slow_name) == "toy[2]"
        assert await toys.call_each(Toy.name, "hi") == [f"hi toy[{rank}]!" for rank in range(3)]
        assert [len(worker.calls) for worker in workers] == [1, 1, 2]

    with_toys(3, use)


@given(lengths=st.lists(st.integers(0, 9), max_size=12), count=st.integers(1, 4))
@settings(max_examples=examples(60), derandomize=True, deadline=None)
def test_data_is_split_by_tokens_and_joined_in_order(lengths: list[int], count: int) -> None:
    async def use(toys: Cluster[Toy], workers: list[Toy]) -> None:
        batch = ragged(lengths)
        result = await toys.call(Toy.scale, batch, 2.0)
        assert result.tolist() == (batch.ids * 2.0).tolist()
        parts = [worker.calls[0] for worker in workers]
        assert sorted(name for part in parts for name in part) == sorted(batch["sample"].tolist())
        tokens = [sum(lengths[int(name[1:])] for name in part) for part in parts]
        assert max(tokens) - min(tokens) <= max(lengths, default=0)

    with_toys(count, use)


def test_data_needs_exactly_one_batch_by_position() -> None:
    async def use(toys: Cluster[Toy], workers: list[Toy]) -> None:
        batch = ragged([1, 2])
        assert await toys.call(Toy.either, 1, batch) == ["[1]", "[0]"]
        for first, second in ((1, 2), (batch, batch)):
            with pytest.raises(TypeError, match=r"Toy\.either is dispatched by data: pass it one Batch"):
                await toys.call(Toy.either, first, second)

    with_toys(2, use)


# what may be called


def test_only_dispatch_methods_may_be_called() -> None:
    async def use(toys: Cluster[Toy], workers: list[Toy]) -> None:
        for call in (toys.call(Toy.private), toys.call_each(Toy.private), toys.call_rank(0, Toy.private)):
            with pytest.raises(TypeError, match=r"Toy\.private is not a @dispatch method"):
                await call

    with_toys(2, use)


def test_a_join_belongs_to_dispatch_by_data() -> None:
    with pytest.raises(TypeError, match="needs a join"):
        dispatch(Dispatch.DATA)
    with pytest.raises(TypeError, match="only such a method"):
        dispatch(Dispatch.ALL, join=join_tokens)


def test_only_calls_on_one_worker_are_batched() -> None:
    with pytest.raises(TypeError, match="one worker"):
        dispatch(Dispatch.ALL, batched=True)


def test_a_marked_method_stays_an_ordinary_method() -> None:
    assert Toy(WorkerPlacement("toy")).name("hello") == "hello toy[0]!"


def test_a_role_without_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="'toy' has no workers"):
        Cluster("toy", [])


# errors


@pytest.mark.parametrize("rank", [0, 2])
def test_an_error_of_any_worker_reaches_the_caller(rank: int) -> None:
    async def use(toys: Cluster[Toy], workers: list[Toy]) -> None:
        with pytest.raises(KeyError, match=rf"from toy\[{rank}\]"):
            await toys.call(Toy.fail, rank)
        assert all(worker.calls == ["fail"] for worker in workers)
        assert await toys.call(Toy.slow_name) == "toy[0]"

    with_toys(3, use)


class Mortal(Worker):
    """Notes that it was closed; some cannot be made, some cannot be closed."""

    def __init__(self, place: WorkerPlacement, closed: list[str], broken: str = "") -> None:
        super().__init__(place)
        if broken == "start":
            raise OSError(f"{place.name} does not start")
        self._closed, self._broken = closed, broken

    async def close(self) -> None:
        await asyncio.sleep(0)
        self._closed.append(self.placement.name)
        if self._broken == "close":
            raise OSError(f"{self.placement.name} does not close")


def test_workers_are_closed_once_the_youngest_first() -> None:
    closed: list[str] = []

    async def main() -> None:
        executor = LocalExecutor()
        await executor.start(
            lambda place: Mortal(place, closed), [WorkerPlacement("a", 0, 2), WorkerPlacement("a", 1, 2)]
        )
        await executor.start(lambda place: Mortal(place, closed), [WorkerPlacement("b")])
        await executor.close()
        await executor.close()

    asyncio.run(main())
    assert closed == ["b[0]", "a[1]", "a[0]"]


def test_an_error_in_one_close_leaves_no_worker_open() -> None:
    closed: list[str] = []

    async def main() -> None:
        executor = LocalExecutor()
        for name, broken in (("a", ""), ("b", "close"), ("c", "")):
            await executor.start(lambda place, broken=broken: Mortal(place, closed, broken), [WorkerPlacement(name)])
        with pytest.raises(OSError, match=r"b\[0\] does not close"):
            await executor.close()

    asyncio.run(main())
    assert closed == ["c[0]", "b[0]", "a[0]"]


def test_workers_started_before_one_that_does_not_start_are_closed() -> None:
    closed: list[str] = []

    async def main() -> None:
        executor = LocalExecutor()
        broken = {2: "start"}
        with pytest.raises(OSError, match=r"toy\[2\] does not start"):
            await executor.start(lambda place: Mortal(place, closed, broken.get(place.rank, "")), places(4))
        await executor.close()

    asyncio.run(main())
    assert closed == ["toy[1]", "toy[0]"]
