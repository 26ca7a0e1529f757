"""Whole runs whose engines are vLLM's: in one process, and on Ray, where an engine's death is mended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from small_runs import SMALL, TINY, Remains, commands

pytestmark = pytest.mark.vllm

VLLM = (*SMALL, "roles.actor_infer.strategy=vllm", "rollout.max_running=8", "model.dtype=fp32")
RAY = ("executor=ray", "ray.object_store_gb=0.2", "ray.start_deadline_s=400", "ray.call_deadline_s=400")
WAIT_S = 400.0
"""An engine starts in half a minute on two quiet cores."""


def engines() -> set[int]:
    """Processes of vLLM's engines, whoever started them."""
    return {pid for pid, command in commands() if any("EngineCore" in part or "VLLM::" in part for part in command)}


@contextmanager
def roll(*arguments: str, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    with output.open("wb") as file:
        command = [sys.executable, "-m", "roll.cli", *arguments]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def wait_for(what: Callable[[], object], process: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert process.poll() is None, output.read_text()
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.01)


def check(path: Path, steps: int, most: float) -> None:
    """Every sample was trained on or dropped, and what was drawn had nearly the trainer's log-probs."""
    remains = Remains(path)
    rows = [row["train/mismatch"] for row in remains.metrics() if "train/mismatch" in row]
    assert len(rows) == steps
    assert max(rows) <= most
    states = [state for state, _, _ in remains.lineage().values()]
    assert states.count("trained") > 0
    assert set(states) <= {"trained", "dropped"}


def gone(before: set[int]) -> None:
    """Returns once no engine is left that was not there before."""
    deadline = time.monotonic() + 30
    while engines() - before:
        assert time.monotonic() < deadline, f"{engines() - before} are left"
        time.sleep(0.1)


def test_a_run_in_one_process(tmp_path: Path) -> None:
    before, output = engines(), tmp_path / "out"
    with roll("train", TINY, *VLLM, f"run={tmp_path / 'run'}", output=output) as process:
        assert process.wait(WAIT_S) == 0, output.read_text()
    check(tmp_path / "run", 2, most=1e-4)
    gone(before)


def test_a_run_on_ray_outlives_the_death_of_its_engine_and_leaves_none_behind_when_it_is_killed(tmp_path: Path) -> None:
    before, output = engines(), tmp_path / "out"
    settings = ("train.steps=1000", "rollout.max_staleness=1", f"run={tmp_path / 'run'}")
    metrics = tmp_path / "run" / "metrics.jsonl"

    def steps() -> int:
        return metrics.read_text().count("train/mismatch_max") if metrics.is_file() else 0

    with roll("train", TINY, *VLLM, *RAY, *settings, output=output) as process:
        wait_for(lambda: steps() >= 1, process, output)
        for pid in engines() - before:
            os.kill(pid, signal.SIGKILL)
        done = steps()
        wait_for(lambda: steps() >= done + 4, process, output)  # one more may have been under way
        wait_for(lambda: engines() - before, process, output)  # on a loaded machine it may be starting once more
        process.send_signal(signal.SIGINT)
        process.wait(60)
    assert "actor_infer[0]" in output.read_text()  # what died was named
    gone(before)
