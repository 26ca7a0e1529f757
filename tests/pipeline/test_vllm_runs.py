"""Whole runs whose engines are vLLM's: in one process, and on Ray, where an engine's death is mended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch
from small_runs import RANKS, SMALL, TINY, Remains, commands

pytestmark = pytest.mark.vllm

VLLM = (*SMALL, "roles.actor_infer.strategy=vllm", "rollout.max_running=8", "model.dtype=fp32")
RAY = ("executor=ray", "ray.object_store_gb=0.2", "ray.start_deadline_s=400", "ray.call_deadline_s=400")
WAIT_S = 400.0
"""An engine starts in half a minute on two quiet cores."""


class Run:
    """A run, and all processes that came of it: those seen below it while it ran, and those with its mark in their
    environments, which a process that gives itself a name may overwrite."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path, mark: str) -> None:
        self.process, self.output, self._mark = process, output, mark.encode()
        self._seen: set[psutil.Process] = set()

    def look(self) -> None:
        """Remembers the processes below it."""
        with suppress(psutil.NoSuchProcess):
            self._seen |= set(psutil.Process(self.process.pid).children(recursive=True))

    def left(self) -> dict[int, list[str]]:
        """Its processes that live, and their commands."""
        self.look()
        seen = {process.pid for process in self._seen if process.is_running()}
        running = {pid: command for pid, command in commands() if any(command)}  # else it has ended
        return {pid: command for pid, command in running.items() if pid in seen or self._mark in _environment(pid)}

    def engines(self) -> set[int]:
        """The processes of its vLLM, by the names they start with or give themselves."""
        names = ("VLLM::", "spawn_main")
        return {pid for pid, command in self.left().items() if any(name in part for part in command for name in names)}

    def wait_for(self, what: Callable[[], object]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not what():
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.01)

    def is_gone(self) -> None:
        """Returns once none of its processes is left."""
        deadline = time.monotonic() + 30
        while left := self.left():
            assert time.monotonic() < deadline, f"{left} are left"
            time.sleep(0.1)


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


@contextmanager
def roll(*arguments: str, output: Path) -> Iterator[Run]:
    mark = f"ROLL_TEST_RUN={uuid.uuid4()}"
    name, _, value = mark.partition("=")
    with output.open("wb") as file:
        command = [sys.executable, "-m", "roll.cli", *arguments]
        environment = {**os.environ, name: value, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            yield (run := Run(process, output, mark))
            run.look()
        finally:
            process.kill()
            process.wait()


def check(path: Path, steps: int, most: float) -> None:
    """Every sample was trained on or dropped, and what was drawn had nearly the trainer's log-probs."""
    remains = Remains(path)
    rows = [row["train/rollout_logprob_diff"] for row in remains.metrics() if "train/rollout_logprob_diff" in row]
    assert len(rows) == steps
    assert max(rows) <= most
    states = [state for state, _, _ in remains.lineage().values()]
    assert states.count("trained") > 0
    assert set(states) <= {"trained", "dropped"}


LORA = "model.lora.rank=4"
RUNS = {
    "in one process": (),
    "two halves of the weights, adapters": ("roles.actor_infer.parallel.tensor=2", LORA),
    "two halves of the weights, on Ray": (*RAY, "roles.actor_infer.parallel.tensor=2"),
    "two engines, adapters": (*RAY, "roles.actor_infer.replicas=2", LORA),
    "two halves of the weights, of a trainer over two ranks": ("roles.actor_infer.parallel.tensor=2", RANKS),
    "broadcast by a trainer over two ranks, on Ray": (*RAY, RANKS, "weight_sync=broadcast"),
}


@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
def test_what_is_drawn_has_the_trainers_log_probs(tmp_path: Path, settings: tuple[str, ...]) -> None:
    if settings and 0 < torch.cuda.device_count() < 3:
        pytest.skip("engines beside the trainer on two GPUs of their own")
    with roll("train", TINY, *VLLM, *settings, f"run={tmp_path / 'run'}", output=tmp_path / "out") as run:
        assert run.process.wait(WAIT_S) == 0, run.output.read_text()
    check(tmp_path / "run", 2, most=1e-4)
    run.is_gone()


def steps_of(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("train/rollout_logprob_diff_max") if metrics.is_file() else 0


def test_ctrl_c_ends_a_step_and_the_end_of_an_engine_the_run(tmp_path: Path) -> None:
    """A terminal's Ctrl-C goes to all processes of its group. Where all is one process nobody starts an engine again."""
    place = tmp_path / "run"
    settings = (*VLLM, "train.steps=1000", f"run={place}")
    with roll("train", TINY, *settings, output=tmp_path / "first") as run:
        run.wait_for(lambda: steps_of(place) >= 1)
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.process.wait(WAIT_S) == 128 + signal.SIGINT, run.output.read_text()
    run.is_gone()
    done = steps_of(place)
    with roll("train", TINY, *settings, "--resume", output=tmp_path / "second") as run:
        run.wait_for(lambda: steps_of(place) > done)
        killed = run.engines()
        assert killed
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        assert run.process.wait(60) == 1, run.output.read_text()
    failed = r"the run failed: .*actor_infer\[0\].*; executor local does not restart it"  # it drew, or took in weights
    assert re.search(failed, run.output.read_text()), run.output.read_text()
    run.is_gone()


def test_an_engine_ends_with_a_run_that_is_killed_while_it_starts(tmp_path: Path) -> None:
    with roll("train", TINY, *VLLM, f"run={tmp_path / 'run'}", output=tmp_path / "out") as run:
        run.wait_for(run.engines)
        time.sleep(1)
        assert run.engines()
    run.is_gone()


def test_ctrl_c_while_an_engine_starts_ends_the_run_and_leaves_nothing(tmp_path: Path) -> None:
    with roll("train", TINY, *VLLM, f"run={tmp_path / 'run'}", output=tmp_path / "out") as run:
        run.wait_for(run.engines)
        time.sleep(1)
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.process.wait(60) == 128 + signal.SIGINT, run.output.read_text()
    said = run.output.read_text()
    assert "stopped" in said.splitlines(), said
    assert "Traceback" not in said, said  # also none of the engine's, which did not hear it
    assert not (tmp_path / "run").exists()
    run.is_gone()


def test_a_run_on_ray_outlives_the_death_of_its_engine_and_leaves_none_behind_when_it_is_killed(tmp_path: Path) -> None:
    settings = ("train.steps=1000", "rollout.max_staleness=1", f"run={tmp_path / 'run'}")

    def steps() -> int:
        return steps_of(tmp_path / "run")

    with roll("train", TINY, *VLLM, *RAY, *settings, output=tmp_path / "out") as run:
        run.wait_for(lambda: steps() >= 1)
        killed = run.engines()
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        done = steps()
        run.wait_for(lambda: steps() >= done + 4)  # one more may have been under way
        assert killed
        run.wait_for(lambda: run.engines() - killed)  # on a loaded machine it may be starting once more
        run.process.send_signal(signal.SIGINT)
        run.process.wait(60)
    assert "actor_infer[0]" in run.output.read_text()  # what died was named
    run.is_gone()
