"""`roll.train`, `roll.evaluate` and `roll.play` where an event loop is running already, as in a notebook."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_runs import SMALL, TINY, Remains

import roll
from roll.pipeline import signals
from roll.pipeline.report import SilentReporter, StepReport
from roll.pipeline.signals import Stopped, outside_loop, signals_to


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Ctrl-C means what it means to a program in the foreground."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def handed_on(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once the main thread has handed on a signal."""
    event = threading.Event()
    forward = signals._Relay.forward

    def noted(self: Any, number: int) -> None:
        forward(self, number)
        event.set()

    monkeypatch.setattr(signals._Relay, "forward", noted)
    return event


def in_loop(work: Callable[[], Any]) -> Any:
    async def call() -> Any:
        return work()

    return asyncio.run(call())


def test_a_run_an_evaluation_and_rollouts(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def work() -> Any:
        summary = roll.train(TINY, overrides=[*SMALL, f"run={run}"], reward="math", reporter=SilentReporter())
        return summary["steps"], roll.evaluate(run, eval={"samples": 4}), roll.play(run, 2)

    steps, evaluation, transcripts = in_loop(work)
    assert steps == Remains(run).checkpoint.step == 2
    assert evaluation.failed == 0
    assert len(transcripts) == 2


class Interrupting(SilentReporter):
    """Sends Ctrl-C, as a notebook does, when the first step is done, and again when it is told to stop at once."""

    def __init__(self, again: bool) -> None:
        self.again = again

    def stepped(self, report: StepReport) -> None:
        if report.step == 1:
            os.kill(os.getpid(), signal.SIGINT)

    def warned(self, text: str) -> None:
        if self.again and "again to stop at once" in text:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_ends_the_step_and_saves(tmp_path: Path) -> None:
    settings = [*SMALL, "train.steps=500", f"run={tmp_path / 'run'}"]
    summary = in_loop(lambda: roll.train(TINY, overrides=settings, reporter=Interrupting(False)))
    assert summary["stopped"] is True
    assert 1 <= Remains(tmp_path / "run").checkpoint.step < 500


def test_a_second_ctrl_c_ends_the_run(tmp_path: Path) -> None:
    settings = [*SMALL, "train.steps=500", f"run={tmp_path / 'run'}"]
    with pytest.raises(KeyboardInterrupt):
        in_loop(lambda: roll.train(TINY, overrides=settings, reporter=Interrupting(True)))
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))
    assert "roll" not in {thread.name for thread in threading.enumerate()}


def test_ctrl_c_before_the_run_begins_leaves_nothing(tmp_path: Path, handed_on: threading.Event) -> None:
    class Impatient(SilentReporter):
        def phase(self, text: str) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            assert handed_on.wait(60)

    settings = [*SMALL, f"run={tmp_path / 'run'}"]
    with pytest.raises(KeyboardInterrupt):
        in_loop(lambda: roll.train(TINY, overrides=settings, reporter=Impatient()))
    assert not (tmp_path / "run").exists()


def test_errors_and_results_come_through() -> None:
    assert in_loop(lambda: outside_loop(threading.current_thread)).name == "roll"
    assert outside_loop(threading.current_thread) is threading.main_thread()
    with pytest.raises(roll.UserError, match="there is no model"):
        in_loop(lambda: roll.evaluate(model="no-such-model", tasks="echo"))


def test_a_signal_that_comes_before_the_run_listens_ends_it(handed_on: threading.Event) -> None:
    def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert handed_on.wait(60)

        async def run() -> None:
            with signals_to(lambda number: None):
                pytest.fail("it began all the same")

        asyncio.run(run())

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Stopped):
        in_loop(lambda: outside_loop(work))
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_shows_no_other_one_as_its_context() -> None:
    with pytest.raises(roll.UserError) as refused:
        roll.evaluate(model="no-such-model", tasks="echo")
    assert refused.value.__context__ is None or refused.value.__suppress_context__
