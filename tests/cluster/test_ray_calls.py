"""Calls on workers that are Ray actors: the same answers as in one process, data that stays where it is, and what a
caller hears when something breaks."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from processes import eventually

from roll.cluster import Cluster, Dispatch, LocalExecutor, Worker, WorkerPlacement, dispatch
from roll.cluster.errors import CallTimedOut, WorkerError
from roll.cluster.ray_executor import RayExecutor
from roll.config.errors import RunError, UserError
from roll.config.schema import RayConfig
from roll.data import Batch
from roll.data.batch import Indices
from roll.data.remote_columns import ColumnBlock, RemoteRef, TokenColumn

pytestmark = pytest.mark.ray

T = TypeVar("T")
MEGABYTE = 10**6


def join_columns(results: Sequence[TokenColumn], parts: Sequence[Indices], whole: Batch) -> TokenColumn:
    return TokenColumn.concat(results, parts)


def join_lists(results: Sequence[list[Any]], parts: Sequence[Indices], whole: Batch) -> list[Any]:
    order = np.argsort(np.concatenate(parts))
    values = [value for result in results for value in result]
    return [values[index] for index in order]


class Declined(ValueError):
    """An answer of `decline`."""


class Odd(Declined):
    """Cannot be made from its arguments: what pickle does."""

    def __init__(self, code: int, *, why: str) -> None:
        super().__init__(f"odd {code}: {why}")


class Stuck(Declined):
    """Holds what cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("stuck with a lock")
        self.lock = threading.Lock()


class Brittle:
    """May be pickled, but not be made again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("not a number",)


class Toy(Worker):
    """A worker that can do what workers do, and what they should not."""

    def __init__(self, place: WorkerPlacement) -> None:
        super().__init__(place)
        self.calls: list[Any] = []

    @dispatch(Dispatch.ALL)
    def self_portrait(self) -> tuple[WorkerPlacement, int, int, str | None, str]:
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
        return self.placement, os.getpid(), len(os.sched_getaffinity(0)), gpus, ray.get_runtime_context().get_node_id()

    @dispatch(Dispatch.ALL)
    def name(self, greeting: str, *, mark: str = "!") -> str:
        self.calls.append(greeting)
        return f"{greeting} {self.placement.name}{mark}"

    @dispatch(Dispatch.ONE)
    async def first(self, value: Any) -> Any:
        await asyncio.sleep(0)
        self.calls.append(value)
        return self.placement.name, value

    @dispatch(Dispatch.ALL)
    def taken(self) -> list[Any]:
        calls, self.calls = self.calls, []
        return calls

    @dispatch(Dispatch.DATA, join=join_lists)
    def sums(self, batch: Batch, factor: int) -> list[tuple[str, int]]:
        self.calls.append(batch["sample"].tolist())
        return [
            (str(name), factor * int(row.sum())) for name, row in zip(batch["sample"], batch.rows("ids"), strict=True)
        ]

    @dispatch(Dispatch.DATA, join=join_columns)
    def halves(self, batch: Batch) -> TokenColumn:
        self.calls.append(batch["sample"].tolist())
        return TokenColumn.flat(batch.ids.astype(np.float32) / 2, batch.offsets)

    @dispatch(Dispatch.ONE)
    def added(self, batch: Batch) -> float:
        return float(batch["ref"].sum(dtype=np.float64))

    @dispatch(Dispatch.ONE)
    def blocks(self, count: int, tokens: int) -> list[ColumnBlock]:
        return [ColumnBlock({"ids": np.full(tokens, number, np.int32)}) for number in range(count)]

    @dispatch(Dispatch.ONE)
    async def through(self, others: Cluster[Toy], rank: int | None, value: Any) -> Any:
        """Calls another role from this worker."""
        return await (others.call(Toy.first, value) if rank is None else others.call_rank(rank, Toy.first, value))

    @dispatch(Dispatch.ONE)
    async def fail_through(self, others: Cluster[Toy]) -> None:
        await others.call(Toy.fail)

    @dispatch(Dispatch.ALL)
    async def hang(self, rank: int) -> str:
        if self.placement.rank == rank:
            await asyncio.sleep(60)
        return self.placement.name

    @dispatch(Dispatch.ONE)
    def fail(self) -> None:
        try:
            _open_weights()
        except OSError as error:
            raise ValueError("the weights cannot be read") from error

    @dispatch(Dispatch.ALL)
    async def fail_in_turn(self) -> None:
        await asyncio.sleep(0.2 * (1 - self.placement.rank))
        raise OSError(f"{self.placement.name} fell")

    @dispatch(Dispatch.ONE, raises=(Declined,))
    def decline(self, make: Callable[[], Exception]) -> None:
        raise make()

    @dispatch(Dispatch.ONE)
    def raises(self, make: Callable[[], BaseException]) -> None:
        raise make()

    @dispatch(Dispatch.ONE)
    def gives(self, make: Callable[[], Any]) -> Any:
        return make()

    @dispatch(Dispatch.ONE, batched=True, raises=(Declined,))
    async def in_a_crowd(self, number: int, make: Callable[[], Any] = lambda: None, *, wait_s: float = 0.0) -> Any:
        self.calls.append(number)
        await asyncio.sleep(wait_s)
        return number, make()

    @dispatch(Dispatch.ONE)
    async def crowd_through(self, others: Cluster[Toy], count: int) -> list[Any]:
        return await asyncio.gather(*(others.call_rank(0, Toy.in_a_crowd, number) for number in range(count)))

    @dispatch(Dispatch.ONE, batched=True, raises=(Declined,))
    async def counts(
        self, report: Callable[[tuple[int, int]], None], upto: int, *, wait_s: float = 0.0, make: Any = lambda: None
    ) -> Any:
        try:
            for number in range(upto):
                report((upto, number))
                await asyncio.sleep(wait_s)
            return upto, make()
        finally:
            self.calls.append(f"counted to {number}")


def _open_weights() -> None:
    raise FileNotFoundError("no file weights.bin")  # the line of the first cause


CAUSE = f'{Path(__file__).name}", line {_open_weights.__code__.co_firstlineno + 1}, in _open_weights'


def ragged(lengths: Sequence[int]) -> Batch:
    total = sum(lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
    names = np.array([f"s{i}" for i in range(len(lengths))], np.str_)
    return Batch(offsets, {"sample": names, "ids": np.arange(total, dtype=np.int32)})


@dataclass(frozen=True)
class Roles:
    """Two roles on Ray, started once for this file, and one in this process."""

    runner: asyncio.Runner
    executor: RayExecutor
    toys: Cluster[Toy]
    other: Cluster[Toy]
    local: Cluster[Toy]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(asyncio.wait_for(work, 300))

    def in_short(self, cluster: Cluster[Toy], deadline_s: float) -> Cluster[Toy]:
        return Cluster(cluster.role, cluster._handles, deadline_s)

    def bytes_of(self, work: Coroutine[Any, Any, T]) -> tuple[T, int]:
        before = self.executor.controller_bytes
        result = self.run(work)
        return result, self.executor.controller_bytes - before


@pytest.fixture(scope="module")
def roles(shared_ray: None) -> Iterator[Roles]:
    from ray import cloudpickle

    here = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(here)  # workers cannot import a test
    executor = RayExecutor(RayConfig(object_store_gb=0.1, start_deadline_s=600, call_deadline_s=300))
    executor.connect()
    with asyncio.Runner() as runner:
        node = executor.nodes()[0].id
        places = [WorkerPlacement("toy", rank, 2, threads=1, node=node) for rank in range(2)]
        alone = [WorkerPlacement("other", threads=1, node=node, cores=(0,))]

        async def start() -> list[Cluster[Toy]]:
            executor.reserve(places + alone)
            started = (Cluster.start(executor, Toy, each) for each in (places, alone))
            return await asyncio.gather(*started, Cluster.start(LocalExecutor(), Toy, places))

        try:
            toys, other, local = runner.run(start())
            yield Roles(runner, executor, toys, other, local)
        finally:
            runner.run(executor.close())
            cloudpickle.unregister_pickle_by_value(here)


# where workers are


def test_each_worker_is_a_process_of_its_own_at_its_placement(roles: Roles) -> None:
    portraits = roles.run(roles.toys.call_each(Toy.self_portrait)) + roles.run(roles.other.call_each(Toy.self_portrait))
    assert [place for place, *_ in portraits] == roles.toys.placements + roles.other.placements
    assert [place.name for place, *_ in portraits] == ["toy[0]", "toy[1]", "other[0]"]
    assert len({os.getpid(), *(pid for _, pid, *_ in portraits)}) == 4
    cores = len(os.sched_getaffinity(0))
    assert [held for _, _, held, _, _ in portraits] == [cores, cores, 1]
    assert [gpus for _, _, _, gpus, _ in portraits] == ["", "", ""]
    assert {node for *_, node in portraits} == {node.id for node in roles.executor.nodes()}
    assert not roles.toys.in_process


def test_the_node_is_this_machine(roles: Roles) -> None:
    (node,) = roles.executor.nodes()
    assert (node.host, node.gpus, node.gpu_bytes) == (socket.gethostname(), 0, 0)
    assert node.cores >= 1
    assert node.memory_bytes > 2**20


# dispatch


def test_all_and_one_and_each_and_rank_are_as_in_one_process(roles: Roles) -> None:
    async def ask(toys: Cluster[Toy]) -> list[Any]:
        return [
            await toys.call(Toy.name, "hello", mark="?"),
            await toys.call(Toy.first, {"deep": [1, (2, None)]}),
            await toys.call_each(Toy.name, "hi"),
            await toys.call_rank(1, Toy.first, value=np.float32(0.1)),
            await toys.call_each(Toy.taken),
        ]

    assert roles.run(ask(roles.toys)) == roles.run(ask(roles.local))


@given(lengths=st.lists(st.integers(0, 9), max_size=12), factor=st.integers(-3, 3))
@settings(max_examples=examples(15), derandomize=True, deadline=None)
def test_data_is_split_and_joined_as_in_one_process(roles: Roles, lengths: list[int], factor: int) -> None:
    async def ask(toys: Cluster[Toy]) -> list[Any]:
        batch = ragged(lengths)
        sums = await toys.call(Toy.sums, batch, factor)
        with_halves = batch.with_columns(ref=await toys.call(Toy.halves, batch))
        whole = await roles.executor.fetch(with_halves)
        return [sums, whole["ref"].tolist(), await toys.call(Toy.added, with_halves), await toys.call_each(Toy.taken)]

    assert roles.run(ask(roles.toys)) == roles.run(ask(roles.local))


def test_functions_and_classes_without_a_name_may_be_passed(roles: Roles) -> None:
    factor = 3
    assert roles.run(roles.toys.call(Toy.gives, lambda: factor * 7)) == 21


def test_batched_calls_behave_as_in_one_process(roles: Roles) -> None:
    async def ask(toys: Cluster[Toy]) -> list[Any]:
        calls = (toys.call_rank(number % 2, Toy.in_a_crowd, number, wait_s=0.001 * (number % 7)) for number in range(200))
        return [*(await asyncio.gather(*calls)), await toys.call_each(Toy.taken)]

    assert roles.run(ask(roles.toys)) == roles.run(ask(roles.local))


def test_what_calls_report_arrives_in_order_and_before_their_results(roles: Roles) -> None:
    async def ask(toys: Cluster[Toy]) -> list[Any]:
        heard: dict[int, list[int]] = {}

        async def call(upto: int) -> Any:
            def listen(each: tuple[int, int]) -> None:
                heard.setdefault(each[0], []).append(each[1])

            result = await toys.stream_rank(upto % 2, Toy.counts, listen, upto)
            return result, list(heard[upto])

        found = await asyncio.gather(*map(call, range(1, 40)))
        await toys.call_each(Toy.taken)
        return found

    found = roles.run(ask(roles.toys))
    assert found == [((upto, None), list(range(upto))) for upto in range(1, 40)]
    assert found == roles.run(ask(roles.local))


@pytest.mark.parametrize("where", ["toys", "local"])
def test_a_call_that_is_cancelled_ends_on_the_worker_and_one_that_fails_says_why(roles: Roles, where: str) -> None:
    toys: Cluster[Toy] = getattr(roles, where)

    def decline() -> None:
        raise Declined("not me")

    async def use() -> None:
        heard: list[tuple[int, int]] = []
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0):
                await toys.stream_rank(0, Toy.counts, heard.append, 9, wait_s=1.1)
        assert heard == [(9, 0), (9, 1)]
        assert (await toys.call_each(Toy.taken))[0] == ["counted to 1"]
        with pytest.raises(ValueError, match="not me") as caught:
            await toys.stream_rank(0, Toy.counts, heard.append, 1, make=decline)
        assert type(caught.value).__name__ == "Declined"
        await toys.call_each(Toy.taken)

    roles.run(use())


def test_batched_calls_may_come_from_another_worker(roles: Roles) -> None:
    assert roles.run(roles.other.call(Toy.crowd_through, roles.toys, 50)) == [(number, None) for number in range(50)]
    assert roles.run(roles.toys.call_each(Toy.taken)) == [list(range(50)), []]


def test_an_error_of_one_batched_call_is_its_own(roles: Roles) -> None:
    def decline() -> None:
        raise Declined("not me")

    def break_down() -> None:
        raise OSError("broken")

    async def ask() -> list[Any]:
        makes: list[Any] = [lambda: 1, decline, break_down, threading.Lock, Brittle, Stuck]
        calls = [roles.toys.call(Toy.in_a_crowd, number, make) for number, make in enumerate(makes)]
        calls.append(roles.in_short(roles.toys, 0.5).call(Toy.in_a_crowd, 6, wait_s=60))
        calls.append(roles.toys.call(Toy.in_a_crowd, 7, threading.Lock()))  # type: ignore[arg-type]
        return await asyncio.gather(*calls, return_exceptions=True)

    good, declined, broken, *unsent, late, uncalled = roles.run(ask())
    roles.run(roles.toys.call_each(Toy.taken))
    assert good == (0, 1)
    assert (type(declined).__name__, str(declined)) == ("Declined", "not me")
    assert str(broken).startswith("toy[0] failed in in_a_crowd: OSError: broken")
    for error in unsent:
        assert isinstance(error, WorkerError)
        assert "an argument or a result that cannot be sent to another process" in str(error)
    assert isinstance(late, CallTimedOut)
    assert str(uncalled).startswith("toy[0].in_a_crowd cannot be called: its arguments cannot be pickled")


# data by reference


def test_a_column_stays_at_the_workers_and_goes_from_there_to_another_role(roles: Roles) -> None:
    tokens = 10 * MEGABYTE // 4
    batch = ragged([tokens // 4] * 4)
    batch, counted = roles.bytes_of(with_halves(roles.toys, batch))
    assert counted > 10 * MEGABYTE, "ids are here, and went through this process"

    column = batch.columns["ref"]
    assert isinstance(column, TokenColumn)
    assert not column.is_local
    with pytest.raises(LookupError, match="in other processes"):
        batch["ref"]
    sparse = Batch(batch.offsets, {"sample": batch["sample"], "ref": column})

    added, counted = roles.bytes_of(roles.other.call(Toy.added, sparse))
    assert added == np.arange(tokens, dtype=np.float32).sum(dtype=np.float64) / 2
    assert counted < 20_000
    assert roles.run(roles.toys.call(Toy.added, sparse.select([2]))) == (batch.rows("ids")[2] / 2).sum()
    fetched = roles.run(roles.executor.fetch(sparse))
    assert np.array_equal(fetched["ref"], batch.ids.astype(np.float32) / 2)
    assert not column.is_local, "the batch is as it was"


async def with_halves(toys: Cluster[Toy], batch: Batch) -> Batch:
    return batch.with_columns(ref=await toys.call(Toy.halves, batch))


def test_blocks_in_a_list_stay_at_the_workers_and_are_freed_with_their_batch(roles: Roles) -> None:
    free = ray.cluster_resources()["object_store_memory"]
    assert eventually(lambda: object_store_bytes_free() > free - 5 * MEGABYTE), "earlier batches are gone"
    blocks, counted = roles.bytes_of(roles.toys.call(Toy.blocks, 4, 10 * MEGABYTE // 4))
    assert counted < 20_000
    assert all(isinstance(block.columns, RemoteRef) for block in blocks)
    assert eventually(lambda: object_store_bytes_free() < free - 35 * MEGABYTE)

    lengths = [MEGABYTE, MEGABYTE]
    column = TokenColumn(tuple(blocks), np.array([1, 3]), np.array([7, 0]), "ids")
    batch = Batch(np.array([0, *np.cumsum(lengths)]), {"ids": column})
    fetched = roles.run(roles.executor.fetch(batch))
    assert [set(row.tolist()) for row in fetched.rows("ids")] == [{1}, {3}]

    del blocks, column, batch, fetched
    gc.collect()
    assert eventually(lambda: object_store_bytes_free() > free - 5 * MEGABYTE)


def test_tokens_that_do_not_come_are_an_error_in_time(roles: Roles) -> None:
    async def ask() -> None:
        hanging = roles.other._handles[0]._actor.call.remote("hang", [0], {})  # type: ignore[attr-defined]
        column = TokenColumn((ColumnBlock(RemoteRef(hanging)),), np.array([0]), np.array([0]), "ids")
        batch = Batch(np.array([0, 3]), {"ids": column})
        with pytest.raises(RunError, match="tokens that workers hold cannot be fetched: "):
            await RayExecutor(RayConfig(call_deadline_s=0.3)).fetch(batch)

    roles.run(ask())


def object_store_bytes_free() -> float:
    return float(ray.available_resources().get("object_store_memory", 0))


# roles that call roles


def test_a_worker_calls_another_roles_workers_directly(roles: Roles) -> None:
    value, counted = roles.bytes_of(roles.other.call(Toy.through, roles.toys, None, "hi"))
    assert value == ("toy[0]", "hi")
    assert counted < 5_000
    assert roles.run(roles.other.call(Toy.through, roles.toys, 1, [2])) == ("toy[1]", [2])
    roles.run(roles.toys.call_each(Toy.taken))


def test_an_error_of_the_other_role_passes_through(roles: Roles) -> None:
    with pytest.raises(WorkerError, match=r"^toy\[0\] failed in fail: FileNotFoundError: no file") as caught:
        roles.run(roles.other.call(Toy.fail_through, roles.toys))
    assert caught.value.worker == "toy[0]"
    assert caught.value.__notes__[0].startswith("in other[0].fail_through (process ")


# deadlines


def test_a_worker_that_hangs_is_named_in_time_and_others_answer(roles: Roles) -> None:
    hasty = roles.in_short(roles.toys, 0.5)
    began = time.monotonic()
    with pytest.raises(CallTimedOut, match=r"^toy\[1\] has not answered hang for 0\.5 s$"):
        roles.run(hasty.call(Toy.hang, 1))
    assert 0.4 < time.monotonic() - began < 3
    assert roles.run(roles.toys.call_rank(0, Toy.first, 1)) == ("toy[0]", 1)
    assert roles.run(roles.toys.call_rank(1, Toy.first, 2)) == ("toy[1]", 2), "it only waits"
    roles.run(roles.toys.call_each(Toy.taken))


# errors


def test_an_error_says_who_what_where_and_the_first_cause_first(roles: Roles) -> None:
    pid = roles.run(roles.toys.call(Toy.self_portrait))[1]
    with pytest.raises(WorkerError) as caught:
        roles.run(roles.toys.call(Toy.fail))
    assert str(caught.value).splitlines()[:3] == [
        "toy[0] failed in fail: FileNotFoundError: no file weights.bin",
        "  which led to ValueError: the weights cannot be read",
        f"  (process {pid} on {socket.gethostname()})",
    ]
    assert CAUSE in caught.value.trace
    assert caught.value.worker == "toy[0]"


def test_of_several_errors_the_earliest_is_raised(roles: Roles) -> None:
    with pytest.raises(WorkerError, match=r"toy\[1\] failed in fail_in_turn: OSError: toy\[1\] fell"):
        roles.run(roles.toys.call(Toy.fail_in_turn))


@pytest.mark.parametrize("kind", [Declined, UserError, RunError])
def test_an_error_that_is_an_answer_arrives_as_itself(roles: Roles, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        roles.run(roles.toys.call(Toy.decline, lambda: kind("not today")))
    assert (type(caught.value), str(caught.value)) == (kind, "not today")
    assert caught.value.__notes__[0].startswith("in toy[0].decline (process ")


@pytest.mark.parametrize("method", [Toy.decline, Toy.raises])
@pytest.mark.parametrize(
    ("make", "said"), [(lambda: Odd(3, why="it is"), "Odd: odd 3: it is"), (Stuck, "Stuck: stuck with a lock")]
)
def test_an_error_that_cannot_travel_is_described(
    roles: Roles, method: Callable[..., Any], make: Callable[[], Exception], said: str
) -> None:
    with pytest.raises(WorkerError, match=rf"^toy\[0\] failed in {method.__name__}: {said}\n"):
        roles.run(roles.toys.call(method, make))


@pytest.mark.parametrize(
    ("make", "said"),
    [(threading.Lock, "cannot pickle '_thread.lock' object"), (Brittle, "not a number"), (lambda: [Brittle()], "number")],
)
def test_a_result_that_cannot_travel_is_an_error_of_its_worker(roles: Roles, make: Callable[[], Any], said: str) -> None:
    with pytest.raises(WorkerError) as caught:
        roles.run(roles.toys.call(Toy.gives, make))
    first, then, place, *_ = str(caught.value).splitlines()
    assert first.startswith("toy[0] failed in gives: ")
    assert said in first
    assert then == "  which led to an argument or a result that cannot be sent to another process"
    assert place.startswith("  (process ")
    assert "\x1b" not in str(caught.value)
    assert roles.run(roles.toys.call(Toy.gives, int)) == 0, "it goes on"


def test_an_argument_that_cannot_travel_is_an_error_that_names_the_call(roles: Roles) -> None:
    with pytest.raises(
        TypeError, match=r"^toy\[0\]\.first cannot be called: its arguments cannot be pickled: .*'_thread\.lock'"
    ):
        roles.run(roles.toys.call(Toy.first, threading.Lock()))
    with pytest.raises(WorkerError, match=r"^toy\[0\] failed in first: ValueError: .*not a number"):
        roles.run(roles.toys.call(Toy.first, Brittle()))
    assert roles.run(roles.toys.call(Toy.gives, int)) == 0, "it goes on"


# what a cluster does not have


def test_devices_that_are_taken_are_refused_in_time_with_what_was_asked_and_what_is_free(roles: Roles) -> None:
    cores = roles.executor.nodes()[0].cores
    second = RayExecutor(RayConfig(start_deadline_s=0.3))
    began = time.monotonic()
    with pytest.raises(RunError) as caught:
        second.reserve([WorkerPlacement("more", threads=cores)])
    assert str(caught.value) == (
        f"the cluster did not give the run its devices within 0.3 s: it asked for {cores} CPU, and free are nothing"
    )
    with pytest.raises(RunError, match=r"asked for 1 GPU \+ 1 CPU, and free"):
        second.reserve([WorkerPlacement("more", device="cuda:0"), WorkerPlacement("more")])
    assert time.monotonic() - began < 5
    roles.run(second.close())
    assert ray.is_initialized(), "it is not the second's"
