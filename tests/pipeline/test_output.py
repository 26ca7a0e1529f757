"""Output that nobody reads is dropped, and the work that printed it continues."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TextIO

import pytest
from before_run import lose_readers
from small_runs import SMALL, TINY, Remains, start_roll

from roll.config import RunError
from roll.pipeline.output import print_line, tolerant_output

NOWHERE = {
    "the reader takes one line": "{ %s; echo $? >&3; } | head -1",
    "all streams closed": "%s <&- >&- 2>&-; echo $? >&3",
    "errors into the same pipe": "{ %s 2>&1; echo $? >&3; } | true",
}
FULL = "%s >/dev/full; echo $? >&3"


def _status(arguments: list[str], how: str, tmp_path: Path) -> tuple[int, str]:
    """The exit status of a command, run with its output as `how` says, and what it wrote to standard error."""
    command = how % shlex.join([sys.executable, *arguments])
    status = tmp_path / "status"
    done = subprocess.run(
        ["bash", "-c", f"exec 3>{status}; {command}"], capture_output=True, text=True, timeout=300, check=True
    )
    return int(status.read_text()), done.stderr


@contextmanager
def broken() -> Iterator[TextIO]:
    """Standard output is a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    with redirect_stdout(stream):
        yield stream


def test_training_continues_when_its_output_has_lost_its_reader(tmp_path: Path) -> None:
    run, errors = tmp_path / "run", tmp_path / "errors"
    arguments = ["train", TINY, *SMALL, f"run={run}"]
    child = start_roll(arguments, tmp_path / "out", errors=errors, before=lose_readers)
    assert (child.end(), errors.read_text()) == (0, "")
    assert Remains(run).checkpoint.step == 2
    assert Remains(run).lineage()  # nothing was printed into the ledger


@pytest.mark.thorough
@pytest.mark.parametrize("how", NOWHERE)
def test_training_continues_when_nobody_reads_its_output(tmp_path: Path, how: str) -> None:
    run = tmp_path / "run"
    status, said = _status(["-m", "roll.cli", "train", TINY, *SMALL, f"run={run}"], NOWHERE[how], tmp_path)
    assert (status, said) == (0, "")
    assert Remains(run).checkpoint.step == 2
    assert Remains(run).lineage()  # nothing was printed into the ledger


@pytest.mark.thorough
def test_training_continues_when_its_log_is_on_a_full_disk(tmp_path: Path) -> None:
    status, said = _status(["-m", "roll.cli", "train", TINY, *SMALL, f"run={tmp_path / 'run'}"], FULL, tmp_path)
    assert (status, said) == (0, "")
    assert Remains(tmp_path / "run").checkpoint.step == 2


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["the reader takes one line", "all streams closed"])
def test_a_training_script_ends_quietly_too(tmp_path: Path, how: str) -> None:
    script = tmp_path / "script.py"
    settings = [*SMALL, f"run={tmp_path / 'run'}"]
    script.write_text(f"import roll\nprint(roll.train(roll.load_config({TINY!r}, {settings!r}))['steps'])\n")
    assert _status([str(script)], NOWHERE[how], tmp_path) == (0, "")
    assert Remains(tmp_path / "run").checkpoint.step == 2


@pytest.mark.parametrize("how", NOWHERE)
@pytest.mark.parametrize("command", [["--version"], ["train", "--help"]])
def test_commands_end_quietly_when_nobody_reads_their_output(tmp_path: Path, command: list[str], how: str) -> None:
    assert _status(["-m", "roll.cli", *command], NOWHERE[how], tmp_path) == (0, "")


@pytest.mark.thorough
def test_a_refusal_keeps_its_exit_status(tmp_path: Path) -> None:
    for how in NOWHERE.values():
        status, _ = _status(["-m", "roll.cli", "train", TINY, "train.lrr=1"], how, tmp_path)
        assert status == 2


def test_a_result_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    status, said = _status(["-m", "roll.cli", "--version"], FULL, tmp_path)
    assert status == 1
    assert said == "the run failed: cannot write to standard output: No space left on device\n"


def test_say_drops_what_nobody_reads() -> None:
    with broken() as stream:
        for _ in range(3):
            print_line("x" * 100_000)
        stream.close()
        print_line("to a closed stream")


def test_tolerant_output_drops_what_is_still_buffered() -> None:
    with broken() as stream:
        with tolerant_output():
            print("not flushed")
        print("later", flush=True)  # to nothing: the stream does not fail again
        stream.close()


def test_other_failures_are_errors_unless_all_are_tolerated() -> None:
    full = Path("/dev/full").open("w")  # noqa: SIM115
    with redirect_stdout(full), tolerant_output(), tolerant_output(every_error=True):
        print("lost", flush=True)
    full = Path("/dev/full").open("w")  # noqa: SIM115
    with redirect_stdout(full), pytest.raises(RunError, match="No space left"), tolerant_output():
        print("lost")


def test_output_that_is_read_arrives_whole(capfd: pytest.CaptureFixture[str]) -> None:
    with tolerant_output(), tolerant_output(every_error=True):
        print(json.dumps({"a": "é"}))
        print_line("b")
    assert capfd.readouterr().out == '{"a": "\\u00e9"}\nb\n'
