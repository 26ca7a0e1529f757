"""Ctrl-C, SIGTERM and SIGHUP: the first ends the step, saves and says how to continue; the second ends at once."""

from __future__ import annotations

import functools
import os
import shlex
import signal
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from before_run import strike
from processes import eventually
from small_runs import EXACT, SMALL, TINY, Remains, start_roll
from thorough import but

from roll.cli import main
from roll.config import load_config
from roll.pipeline.entrypoints import train
from roll.pipeline.report import PlainReporter


def _steps_done(path: Path) -> int:
    return len(list(path.glob("samples/step-*.jsonl")))


@pytest.mark.parametrize("number", but({signal.SIGINT}, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))
def test_the_first_interrupt_saves_and_prints_the_command_that_finishes_the_run(
    tmp_path: Path, undisturbed: Remains, number: signal.Signals
) -> None:
    path = tmp_path / "a run"
    overrides = [
        *EXACT,
        "run.checkpoint_every=0",
        f"run={path}",
        "rollout.stop=[zzzz]",
        "tasks.options={symbols: '0123456789'}",
    ]
    child = start_roll(["train", TINY, *overrides], tmp_path / "out")
    child.wait_for(lambda: _steps_done(path) >= 1)
    os.kill(child.pid, number)
    assert child.end() == 128 + number, child.said
    assert "Traceback" not in child.said
    assert "stopping after this step and saving" in child.said
    assert eventually(lambda: not child.graders())
    run = Remains(path)
    stopped_at = run.checkpoint.step
    assert 1 <= stopped_at < 6
    summary = run.folder.read_summary()
    assert summary is not None
    assert summary["stopped"] is True
    assert summary["stopped_by"] == number.name
    assert f"stopped after step {stopped_at} of 6; continue with" in child.said

    command = shlex.split(child.said.strip().splitlines()[-1])
    assert command[:2] == ["roll", "train"]
    assert main(command[1:]) == 0
    assert run.checkpoint.step == 6
    assert run.weights() == undisturbed.weights()
    assert run.samples() == undisturbed.samples()


@pytest.fixture
def heard() -> Iterator[None]:
    """Ctrl-C means what it means to a program in the foreground; a shell's background jobs are started deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
def test_an_interrupt_while_a_run_starts_leaves_nothing(tmp_path: Path) -> None:
    class Impatient(PlainReporter):
        def phase(self, text: str) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    config = load_config(TINY, [*SMALL, f"run={tmp_path / 'run'}"])
    with pytest.raises(KeyboardInterrupt):
        train(config, reporter=Impatient())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("where", "number"),
    [
        ("the config", signal.SIGTERM),
        ("the folder", signal.SIGTERM),
        ("a worker", signal.SIGHUP),
        ("the graders", signal.SIGINT),
    ],
)
def test_a_signal_while_a_run_starts_leaves_nothing_and_no_traceback(
    tmp_path: Path, where: str, number: signal.Signals
) -> None:
    """While the folder is made, before the workers start, while one is made in a task that others wait for, and when the
    graders run."""
    arguments = ["train", TINY, *SMALL, f"run={tmp_path / 'runs' / 'run'}"]
    errors = tmp_path / "errors"
    child = start_roll(arguments, tmp_path / "out", errors=errors, before=functools.partial(strike, where, number))
    assert child.end() == 128 + number, errors.read_text()
    assert "Traceback" not in errors.read_text()
    assert errors.read_text().endswith("stopped\n")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_second_interrupt_ends_at_once(tmp_path: Path, second: signal.Signals) -> None:
    """A grader that hangs keeps the step from ending; the second signal does not wait for it."""
    path = tmp_path / "run"
    hang = tmp_path / "hang.py"
    hang.write_text(
        "import time\n"
        "from pathlib import Path\n"
        "def hang(task, response):\n"
        "    Path(__file__).with_name('called').touch()\n"
        "    time.sleep(600)\n"
    )
    arguments = ["train", TINY, *SMALL, f"run={path}", f"reward={hang}:hang", "reward.deadline_s=600"]
    child = start_roll(arguments, tmp_path / "out")
    child.wait_for((tmp_path / "called").exists)
    os.kill(child.pid, signal.SIGINT)
    child.wait_for(lambda: "again to stop at once" in child.said)
    os.kill(child.pid, second)
    assert child.end() == 128 + second, child.said
    assert child.said.rstrip().endswith("stopped")
    assert "Traceback" not in child.said
    assert eventually(lambda: not child.graders())
    assert not list(path.glob("checkpoints/step-*"))


def test_a_run_that_ignores_hang_ups_keeps_ignoring_them(tmp_path: Path) -> None:
    """As under `nohup`."""
    path = tmp_path / "run"
    ignoring = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    child = start_roll(["train", TINY, *SMALL, "train.steps=3", f"run={path}"], tmp_path / "out", before=ignoring)
    child.wait_for(lambda: _steps_done(path) >= 1)
    os.kill(child.pid, signal.SIGHUP)
    assert child.end() == 0, child.said
    assert Remains(path).checkpoint.step == 3


@pytest.mark.parametrize(
    ("command", "number"),
    but(
        {("eval", signal.SIGINT), ("eval", signal.SIGHUP), ("rollout", signal.SIGTERM)},
        product(("eval", "rollout"), (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)),
    ),
)
def test_a_signal_ends_a_command_that_saves_nothing_in_order(
    tmp_path: Path, command: str, number: signal.Signals
) -> None:
    called = tmp_path / "called"
    hang = tmp_path / "hang.py"
    hang.write_text(f"import time\ndef hang(task, response):\n    open({str(called)!r}, 'w')\n    time.sleep(600)\n")
    child = start_roll([command, TINY, *SMALL, f"reward={hang}:hang", "reward.deadline_s=600"], tmp_path / "out")
    child.wait_for(called.exists)
    os.kill(child.pid, number)
    assert child.end() == 128 + number, child.said
    assert child.said.strip() == "stopped"
    assert eventually(lambda: not child.graders())
