"""Whole runs whose engines are vLLM's: in one process, and on Ray, where an engine's death is mended."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from small_runs import SMALL, TINY, Remains, commands, start_roll

pytestmark = pytest.mark.vllm

VLLM = (*SMALL, "roles.actor_infer.strategy=vllm", "rollout.max_running=8")
RAY = ("executor=ray", "ray.object_store_gb=0.2", "ray.start_deadline_s=300", "ray.call_deadline_s=300")
NEAR = 1e-4


def engines() -> set[int]:
    """Processes of vLLM's engines, whoever started them."""
    return {pid for pid, command in commands() if any("EngineCore" in part or "VLLM::" in part for part in command)}


def check(path: Path, steps: int) -> None:
    """All was trained on once, and what was drawn had the trainer's log-probs."""
    remains = Remains(path)
    rows = [row for row in remains.metrics() if "correction/mean_abs_diff" in row]
    assert len(rows) == steps
    assert all(row["correction/mean_abs_diff"] <= NEAR for row in rows)
    states = [state for state, _, _ in remains.lineage().values()]
    assert states.count("trained") > 0
    assert set(states) <= {"trained", "dropped"}


def test_a_run_in_one_process(tmp_path: Path) -> None:
    before = engines()
    child = start_roll(["train", TINY, *VLLM, f"run={tmp_path / 'run'}"], tmp_path / "out")
    assert child.end() == 0, child.said
    check(tmp_path / "run", 2)
    assert engines() <= before


def test_a_run_on_ray_outlives_the_death_of_its_engine(tmp_path: Path) -> None:
    before = engines()
    settings = ("train.steps=6", "rollout.max_staleness=1", "rollout.on_update=pause")
    child = start_roll(["train", TINY, *VLLM, *RAY, *settings, f"run={tmp_path / 'run'}"], tmp_path / "out")
    child.wait_for(lambda: "step 1/6" in child.said)
    mine = engines() - before
    assert mine
    for pid in mine:
        os.kill(pid, signal.SIGKILL)
    assert child.end() == 0, child.said
    assert "actor_infer[0]" in child.said  # it was told that the engine died
    check(tmp_path / "run", 6)
    assert engines() <= before
