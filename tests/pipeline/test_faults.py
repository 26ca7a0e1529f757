"""Workers that are killed or stopped in the middle of a step: the run goes on, ends well, and its ledger balances."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from small_runs import TINY, Child, start_roll

from roll.ledger.index import LedgerIndex
from roll.run import Ledger, Metrics, RunFolder

TASKS = Path(__file__).with_name("mixed_tasks.py")
SETTINGS = (
    f"tasks={TASKS}:mixed",
    "threads=1",
    "train.steps=1000",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.max_new_tokens=48",
    "rollout.filter=none",
    "eval.every=0",
    "eval.samples=4",
    "run.checkpoint_every=1",
    "run.tensorboard=false",
    "run.curve=false",
    "fault_tolerance.hang_s=4",
    "fault_tolerance.ping_s=0.5",
    "fault_tolerance.restarts=100",
)
ROLES = ("actor_infer-0", "reward-0", "env-0", "rollout-0", "actor_train-0")


@dataclass
class Run:
    folder: RunFolder
    child: Child

    @property
    def steps(self) -> int:
        """Training steps on record."""
        if not self.folder.metrics_path.is_file():
            return 0
        return max((row["step"] for row in Metrics.read(self.folder.metrics_path) if "time/step_s" in row), default=0)

    def reach(self, step: int) -> None:
        self.child.wait_for(lambda: self.steps >= step, every_s=0.05)

    def pid(self, worker: str) -> int:
        """The process a worker is, or was last when it was ready."""
        log = (self.folder.path / "logs" / f"{worker}.log").read_text()
        return int(re.findall(r" is process (\d+) on .*?is ready", log, re.DOTALL)[-1])

    def finish(self) -> None:
        """Asks it to stop, and holds that it ended in order and left nothing open."""
        os.kill(self.child.pid, signal.SIGINT)
        assert self.child.end() == 128 + signal.SIGINT, self.child.said
        with LedgerIndex.open(self.folder.ledger_path) as index:
            balance = index.balance()
        assert not balance.problems
        assert balance.groups.open == 0
        assert balance.groups.trained >= 4

    def reasons(self) -> set[str]:
        return {t.reason.partition(":")[0] for t in Ledger.read(self.folder.ledger_path) if t.reason}


@contextmanager
def running(folder: Path, *settings: str) -> Iterator[Run]:
    child = start_roll(["train", TINY, f"run.dir={folder / 'run'}", *SETTINGS, *settings], folder / "output.txt")
    try:
        yield Run(RunFolder(folder / "run"), child)
    finally:
        child.kill()


def hurt(run: Run, worker: str, how: signal.Signals, after_s: float) -> None:
    """Hurts a worker in the middle of a step and waits until it is back and the run has made more steps."""
    time.sleep(after_s)
    hurt_pid = run.pid(worker)
    os.kill(hurt_pid, how)
    run.child.wait_for(lambda: run.pid(worker) != hurt_pid, every_s=0.05)
    run.reach(run.steps + 2)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_on_ray_survives_the_death_and_the_silence_of_every_worker(tmp_path: Path, staleness: int) -> None:
    settings = ("executor=ray", f"rollout.max_staleness={staleness}", "roles.actor_infer.replicas=2")
    with running(tmp_path, *settings, "roles.rollout.replicas=2") as run:
        run.reach(2)
        for number, worker in enumerate(ROLES):
            for how in (signal.SIGKILL, signal.SIGSTOP):
                hurt(run, worker, how, after_s=0.1 + 0.15 * (number % 3))
        run.finish()
    assert {"engine died", "rollout worker died"} & run.reasons()
    assert any(t.state == "rolled_back" for t in Ledger.read(run.folder.ledger_path))


def children_of(pid: int, command: str) -> list[int]:
    """Processes under a process whose command line has that text."""
    found, parents = [], [pid]
    while parents:
        parent = parents.pop()
        listed = Path(f"/proc/{parent}/task/{parent}/children")
        for child in map(int, listed.read_text().split() if listed.exists() else []):
            parents.append(child)
            line = Path(f"/proc/{child}/cmdline")
            if line.exists() and command.encode() in line.read_bytes():
                found.append(child)
    return found


def test_a_run_in_one_process_survives_its_graders_and_environments(tmp_path: Path) -> None:
    settings = (
        "reward=fuzzy",
        "reward.deadline_s=2",
        "env.step_deadline_s=2",
        "env.reset_deadline_s=4",
        "rollout.max_new_tokens=4",
    )
    with running(tmp_path, *settings) as run:
        run.reach(2)
        for process in ("roll.reward.grader_main", "roll.env.env_server"):
            for how in (signal.SIGKILL, signal.SIGSTOP):
                step = run.steps
                os.kill(children_of(run.child.pid, process)[0], how)
                run.reach(step + 2)
        run.finish()
