"""What a caller reads of a worker's failure: who, where, and the first cause first."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roll.cluster import Dispatch, Worker, WorkerPlacement, dispatch
from roll.cluster.errors import CallFailure, CallTimedOut, WorkerDied, WorkerError
from roll.cluster.worker_runtime import CallResult, WorkerRuntime
from roll.config.errors import RunError


def caught(act: Callable[[], None]) -> Exception:
    try:
        act()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def opened() -> None:
    raise FileNotFoundError("no file weights.bin\nsecond line")


def loaded() -> None:
    try:
        opened()
    except OSError as error:
        raise ValueError("the weights cannot be read") from error


def served() -> None:
    try:
        loaded()
    except ValueError:
        raise RuntimeError  # noqa: B904


def hidden() -> None:
    try:
        opened()
    except OSError:
        raise ValueError("only this") from None


def of(act: Callable[[], None]) -> CallFailure:
    return CallFailure.of(caught(act), "actor_infer[2]", "load_weights", "process 7 on node-3")


def test_causes_come_first_to_last_one_line_each() -> None:
    assert of(opened).causes == ("FileNotFoundError: no file weights.bin",)
    assert of(loaded).causes == ("FileNotFoundError: no file weights.bin", "ValueError: the weights cannot be read")
    assert of(served).causes == (*of(loaded).causes, "RuntimeError")
    assert of(hidden).causes == ("ValueError: only this",)


def test_a_chain_that_bites_its_tail_ends() -> None:
    first, second = KeyError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    assert CallFailure.of(first, "a[0]", "m", "here").causes == ("KeyError: 'second'", "KeyError: 'first'")


def test_the_trace_is_the_workers_own() -> None:
    trace = of(loaded).trace
    assert trace.index("no file weights.bin") < trace.index("the weights cannot be read")
    assert "in opened" in trace
    assert Path(__file__).name in trace


def test_the_message_has_the_worker_the_first_cause_what_it_led_to_and_where() -> None:
    found = of(served)
    error = WorkerError(found)
    assert isinstance(error, RunError)
    lines = str(error).splitlines()
    assert lines[:4] == [
        "actor_infer[2] failed in load_weights: FileNotFoundError: no file weights.bin",
        "  which led to ValueError: the weights cannot be read",
        "  which led to RuntimeError",
        "  (process 7 on node-3)",
    ]
    assert lines[4] == "    Traceback (most recent call last):"
    assert all(line.startswith("    ") for line in lines[4:])
    assert (error.worker, error.trace, error.at_s) == ("actor_infer[2]", found.trace, found.at_s)


def test_a_failure_travels_whatever_its_error_was() -> None:
    class Local(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__("cannot be pickled")
            self.block = lambda: None

    def act() -> None:
        raise Local(1, 2)

    found = of(act)
    assert pickle.loads(pickle.dumps(found)) == found
    assert found.causes == ("Local: cannot be pickled",)


def test_a_death_shows_the_end_of_the_workers_log(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    assert str(WorkerDied("a[0]", "gone", log)) == "a[0] died: gone"
    log.write_text("")
    assert str(WorkerDied("a[0]", "gone", log)) == "a[0] died: gone"
    log.write_bytes(b"".join(b"line %d \xff\n" % number for number in range(5000)))
    said = str(WorkerDied("a[0]", "gone", log)).splitlines()
    assert said[:2] == ["a[0] died: gone", f"  the end of {log}:"]
    assert [line.split()[1] for line in said[2:]] == [str(number) for number in range(4985, 5000)]
    assert str(WorkerDied("a[0]", "gone")) == "a[0] died: gone"


def test_a_late_answer_names_who_did_not_answer_what() -> None:
    assert str(CallTimedOut("a[0]", "update", 0.5)) == "a[0] has not answered update for 0.5 s"


@pytest.mark.parametrize("error", [CallTimedOut("a[0]", "m", 1), WorkerDied("a[0]", "gone"), WorkerError(of(served))])
def test_a_workers_error_travels_through_another_worker(error: RunError) -> None:
    error.add_note("in rollout[0].report")
    arrived = pickle.loads(pickle.dumps(error))
    assert (type(arrived), str(arrived), vars(arrived)) == (type(error), str(error), vars(error))


def test_an_error_that_ends_many_calls_names_its_origin_once() -> None:
    class Broken(Worker):
        error = RunError("the engine failed")

        @dispatch(Dispatch.ONE)
        def answer(self) -> None:
            raise self.error

    async def main() -> list[CallResult | CallFailure]:
        async def nothing(refs: Any) -> Any:
            return []

        runtime = WorkerRuntime(WorkerPlacement("broken"), None, nothing, None)
        await runtime.start(Broken)
        return [await runtime.call("answer", (), {}) for _ in range(3)]

    results = asyncio.run(main())
    for result in results:
        assert isinstance(result, CallResult)
        assert result.error is not None
        (note,) = result.error.__notes__
        assert note.startswith("in broken[0].answer (process ")
