"""A worker's process, driven here: what may leave it and as what, and where token columns stay."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import pytest

from roll.cluster import Dispatch, Worker, WorkerPlacement, dispatch
from roll.cluster.errors import CallFailure, TokensLost
from roll.cluster.worker_runtime import CallResult, StartInfo, WorkerRuntime, where
from roll.config.errors import RunError, UserError
from roll.data import Batch, Sample, Task
from roll.data.batch import token_block
from roll.data.remote_columns import ColumnBlock, Columns, RemoteRef, TokenColumn, block_to_remote

PLACE = WorkerPlacement("role", 3, 4)


class Declined(ValueError):
    """An answer of `decline`."""


class Guest(Worker):
    def __init__(self, place: WorkerPlacement) -> None:
        super().__init__(place)
        self.seen: list[Any] = []
        self.closed = 0

    @dispatch(Dispatch.ONE)
    def echo(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append((args, kwargs))
        return args[0] if args else None

    @dispatch(Dispatch.ONE, batched=True)
    async def later(self, value: Any) -> Any:
        await asyncio.sleep(0)
        return value

    @dispatch(Dispatch.ONE, raises=(Declined,))
    def decline(self, error: Exception) -> None:
        raise error

    @dispatch(Dispatch.ONE)
    async def fail(self, error: BaseException) -> None:
        await asyncio.sleep(0)
        try:
            raise KeyError("the cause")
        except KeyError as cause:
            raise error from cause

    @dispatch(Dispatch.ONE)
    async def wait(self) -> None:
        await asyncio.Event().wait()

    @dispatch(Dispatch.ONE)
    def total(self, batch: Batch) -> int:
        self.seen.append(batch)
        return int(batch.ids.sum())

    @dispatch(Dispatch.ONE)
    def column(self, batch: Batch) -> TokenColumn:
        return TokenColumn.flat(batch.ids.astype(np.float32), batch.offsets)

    def private(self) -> None: ...

    async def close(self) -> None:
        self.closed += 1


class Memory:
    """Shared memory: `get` and `put` of a host."""

    def __init__(self) -> None:
        self.kept: list[Columns] = []
        self.asked: list[list[int]] = []

    def put(self, columns: Columns) -> int:
        self.kept.append(columns)
        return len(self.kept) - 1

    async def get(self, refs: Sequence[int]) -> list[Columns]:
        await asyncio.sleep(0)
        self.asked.append(list(refs))
        return [self.kept[ref] for ref in refs]


def hosting(use: Callable[[WorkerRuntime, Memory], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        memory = Memory()
        host = WorkerRuntime(PLACE, None, memory.get, memory.put)
        assert await host.start(Guest) == CallResult(StartInfo(where(), frozenset({"later"})))
        await asyncio.wait_for(use(host, memory), 200)

    asyncio.run(main())


def guest(host: WorkerRuntime) -> Guest:
    assert isinstance(host._worker, Guest)
    return host._worker


def samples(*lengths: int) -> list[Sample]:
    made = []
    for number, length in enumerate(lengths):
        made.append(Sample(f"0.{number}", Task.ask("t", "?"), 0, 1.0))
        made[-1].log.prompt([10 * number + i for i in range(length)])
    return made


def batch_elsewhere(memory: Memory, *lengths: int) -> Batch:
    """Each sample in a block of its own."""
    made = samples(*lengths)
    blocks = [block_to_remote(token_block([sample]), memory.put) for sample in made]
    zeros = np.zeros(len(made), np.int64)
    return Batch.from_blocks(made, lengths, blocks, np.arange(len(made)), zeros)


# values and errors


def test_a_call_gives_its_value() -> None:
    async def use(host: WorkerRuntime, memory: Memory) -> None:
        assert await host.call("echo", [1, "two"], {"three": 3}) == CallResult(value=1)
        assert await host.call("later", ["soon"], {}) == CallResult(value="soon")
        assert guest(host).seen == [((1, "two"), {"three": 3})]

    hosting(use)


@pytest.mark.parametrize("error", [Declined("no"), UserError("write this"), RunError("it died")])
def test_declared_errors_and_those_of_user_and_run_are_answers(error: Exception) -> None:
    async def use(host: WorkerRuntime, memory: Memory) -> None:
        answer = await host.call("decline", [error], {})
        assert isinstance(answer, CallResult)
        assert answer.error is error
        assert error.__notes__ == [f"in role[3].decline ({where()})"]

    hosting(use)


@pytest.mark.parametrize("error", [ValueError("a base of the declared one"), OSError("disk"), TimeoutError()])
def test_other_errors_leave_as_a_description(error: Exception) -> None:
    async def use(host: WorkerRuntime, memory: Memory) -> None:
        answer = await host.call("decline", [error], {})
        assert isinstance(answer, CallFailure)
        assert (answer.worker, answer.method, answer.where) == ("role[3]", "decline", where())
        assert answer.causes[0].startswith(type(error).__name__)

    hosting(use)


def test_an_error_declared_by_one_method_is_not_an_answer_of_another() -> None:
    async def use(host: WorkerRuntime, memory: Memory) -> None:
        answer = await host.call("fail", [Declined("no")], {})
        assert isinstance(answer, CallFailure)
        assert answer.causes == ("KeyError: 'the cause'", "Declined: no")
        assert "in fail" in answer.trace
        assert await host.call("later", [1], {}) == CallResult(value=1)  # it goes on

    hosting(use)


def test_a_failure_is_logged_at_its_worker(caplog: pytest.LogCaptureFixture) -> None:
    async def use(host: WorkerRuntime, memory: Memory) -> None:
        await host.call("fail", [OSError("disk")], {})

    hosting(use)
    assert "OSError: disk" in caplog.text


def test_a_cancelled_call_is_cancelled() -> None:
    async def use(host: WorkerRuntime, memory: Memory) -> None:
        call = asyncio.create_task(host.call("wait", [], {}))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    hosting(use)


@pytest.mark.parametrize("error", [UserError("no such model"), RunError("no memory")])
def test_a_start_the_user_can_mend_is_an_answer(error: Exception) -> None:
    def make(place: WorkerPlacement) -> Worker:
        raise error

    async def main() -> None:
        memory = Memory()
        assert await WorkerRuntime(PLACE, None, memory.get, memory.put).start(make) == CallResult(error=error)

    asyncio.run(main())


def test_a_start_that_breaks_is_a_failure_that_says_so() -> None:
    def make(place: WorkerPlacement) -> Worker:
        raise ZeroDivisionError("oops")

    async def main() -> None:
        memory = Memory()
        answer = await WorkerRuntime(PLACE, None, memory.get, memory.put).start(make)
        assert isinstance(answer, CallFailure)
        assert (answer.method, answer.causes) == ("its start", ("ZeroDivisionError: oops",))

    asyncio.run(main())


def test_a_worker_is_closed_once() -> None:
    async def use(host: WorkerRuntime, memory: Memory) -> None:
        worker = guest(host)
        await host.close()
        await host.close()
        assert worker.closed == 1

    hosting(use)


def test_where_names_the_process_and_its_node() -> None:
    assert where() == f"process {os.getpid()} on {socket.gethostname()}"


# token columns


def test_a_batch_is_all_here_before_the_method_sees_it() -> None:
    async def use(host: WorkerRuntime, memory: Memory) -> None:
        batch = batch_elsewhere(memory, 3, 2)
        assert await host.call("total", [batch], {}) == CallResult(value=0 + 1 + 2 + 10 + 11)
        assert memory.asked == [[0, 1]]  # four columns, each reference once, all at once
        (seen,) = guest(host).seen
        assert all(not isinstance(block.columns, RemoteRef) for block in seen.blocks)
        assert all(isinstance(block.columns, RemoteRef) for block in batch.blocks)

    hosting(use)


def test_only_what_is_elsewhere_is_fetched_and_other_arguments_are_left_alone() -> None:
    async def use(host: WorkerRuntime, memory: Memory) -> None:
        batch = Batch.from_samples(samples(2))
        await host.call("echo", [batch, [1], "x"], {"key": 5})
        assert memory.asked == []
        ((args, kwargs),) = guest(host).seen
        assert args[0].ids.tolist() == [0, 1]
        assert (args[1:], kwargs) == (([1], "x"), {"key": 5})

    hosting(use)


def test_a_selected_batch_fetches_no_more_than_it_has() -> None:
    async def use(host: WorkerRuntime, memory: Memory) -> None:
        batch = batch_elsewhere(memory, 3, 2, 4)
        assert await host.call("total", [batch.select([1])], {}) == CallResult(value=21)
        assert memory.asked == [[1]]

    hosting(use)


def test_tokens_that_cannot_be_fetched_are_a_failure() -> None:
    async def lost(refs: Sequence[Any]) -> Sequence[Columns]:
        raise LookupError("the object is lost")

    async def main() -> None:
        memory = Memory()
        host = WorkerRuntime(PLACE, None, lost, memory.put)
        await host.start(Guest)
        answer = await host.call("total", [batch_elsewhere(memory, 2)], {})
        assert isinstance(answer, CallFailure)
        assert answer.causes == ("LookupError: the object is lost",)

    asyncio.run(main())


def test_tokens_that_are_lost_are_said_to_be_lost() -> None:
    async def lost(refs: Sequence[Any]) -> Sequence[Columns]:
        raise TokensLost("tokens that a worker held are lost (OwnerDiedError)")

    async def main() -> None:
        memory = Memory()
        host = WorkerRuntime(PLACE, None, lost, memory.put)
        await host.start(Guest)
        answer = await host.call("total", [batch_elsewhere(memory, 2)], {})
        assert isinstance(answer, CallResult)
        assert isinstance(answer.error, TokensLost)
        assert isinstance(pickle.loads(pickle.dumps(answer)).error, TokensLost)

    asyncio.run(main())


def test_token_columns_of_a_result_stay_and_a_reference_travels() -> None:
    async def use(host: WorkerRuntime, memory: Memory) -> None:
        batch = Batch.from_samples(samples(3, 2))
        answer = await host.call("column", [batch], {})
        assert isinstance(answer, CallResult)
        column = answer.value
        assert not column.is_local
        assert [block.columns for block in column.blocks] == [RemoteRef(0)]
        assert memory.kept[0]["values"].tolist() == [0, 1, 2, 10, 11]
        whole = batch.with_columns(ref=column).resolved(lambda refs: [memory.kept[ref] for ref in refs])
        assert whole["ref"].tolist() == [0, 1, 2, 10, 11]

    hosting(use)


@pytest.mark.parametrize("nested", [False, True])
def test_blocks_of_a_result_stay_also_in_lists(nested: bool) -> None:
    async def use(host: WorkerRuntime, memory: Memory) -> None:
        gone = ColumnBlock(RemoteRef("there"))
        blocks: Any = [token_block(samples(2)), gone, token_block(samples(1))]
        answer = await host.call("later", [[blocks, 5] if nested else blocks], {})
        assert isinstance(answer, CallResult)
        found = answer.value[0] if nested else answer.value
        assert [block.columns for block in found] == [RemoteRef(0), RemoteRef("there"), RemoteRef(1)]
        assert found[1] is gone
        assert memory.kept[0]["ids"].tolist() == [0, 1]
        single = await host.call("later", [token_block(samples(1))], {})
        assert isinstance(single, CallResult)
        assert single.value.columns == RemoteRef(2)

    hosting(use)


def test_other_results_travel_as_they_are() -> None:
    async def use(host: WorkerRuntime, memory: Memory) -> None:
        for value in (None, {"a": 1}, (1, 2), [3, "x"], np.arange(3)):
            answer = await host.call("later", [value], {})
            assert isinstance(answer, CallResult)
            assert np.array_equal(answer.value, value) if isinstance(value, np.ndarray) else answer.value == value
        assert memory.kept == []

    hosting(use)
