"""Ranks of sharded roles that are killed, in the middle of a step and while they restart: the run returns to its last
checkpoint by itself, on new processes, and ends in the bits of a run that nobody disturbed."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from classifiers import save_liking
from small_runs import ONE, RANKS, SMALL, TINY, Child, Remains, start_roll

from roll.run import Ledger, RunFolder


def start(folder: Path, *settings: str) -> Child:
    return start_roll(["train", TINY, f"run.dir={folder}", *settings], folder.with_suffix(".txt"))


def processes(folder: Path, worker: str) -> list[int]:
    """The processes that a worker has been, the present one last."""
    log = folder / "logs" / f"{worker}.log"
    return [int(pid) for pid in re.findall(r" is process (\d+) on ", log.read_text())] if log.is_file() else []


@pytest.mark.thorough
def test_a_run_survives_a_killed_rank_and_one_that_is_killed_while_the_group_restarts(
    over_ranks: Remains, tmp_path: Path
) -> None:
    hurt = tmp_path / "hurt"
    child = start(hurt, *ONE, RANKS, "fault_tolerance.spare_trainer=true")
    try:
        child.wait_for(lambda: Remains(hurt).steps() >= 3)
        first = processes(hurt, "actor_train-0")
        os.kill(processes(hurt, "actor_train-1")[-1], signal.SIGKILL)
        child.wait_for(lambda: len(processes(hurt, "actor_train-0")) > len(first))
        os.kill(processes(hurt, "actor_train-0")[-1], signal.SIGKILL)
        assert child.end() == 0, child.said
    finally:
        child.kill()
    said = re.findall(r"warning: (.*): rolling back to the last checkpoint", child.said)
    assert said == [f"actor_train[{rank}] died: its process was killed by SIGKILL" for rank in (1, 0)]
    assert "peer" not in child.said
    assert len(over_ranks.shards()) == 2
    assert Remains(hurt).shards() == over_ranks.shards()


@pytest.mark.thorough
def test_a_reward_model_over_ranks_is_restarted_and_goes_on_grading(tmp_path: Path) -> None:
    liking, run = save_liking(tmp_path / "liking", "7"), tmp_path / "run"
    roles = f"roles.reward_model={{model: {liking}, strategy: sharded, replicas: 2}}"
    child = start(run, *SMALL, roles, "reward=reward_model", "train.steps=1000")
    try:
        child.wait_for(lambda: Remains(run).steps() >= 1)
        os.kill(processes(run, "reward_model-1")[-1], signal.SIGKILL)
        child.wait_for(lambda: len(processes(run, "reward_model-0")) == 2)
        done = Remains(run).steps()
        child.wait_for(lambda: Remains(run).steps() >= done + 2)
        os.kill(child.pid, signal.SIGINT)
        assert child.end() == 128 + signal.SIGINT, child.said
    finally:
        child.kill()
    said = re.findall(r"warning: (.*); it is restarted", child.said)
    assert said == ["reward_model[1] died: its process was killed by SIGKILL"]
    failed = [t.reason for t in Ledger.read(RunFolder(run).ledger_path) if t.state == "failed"]
    assert not [reason for reason in failed if "unanswered" in reason]
