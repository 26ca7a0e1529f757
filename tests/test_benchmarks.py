"""Every benchmark runs, made small, and prints the figures it is known by. How fast anything is stands in no test."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ENGINE = "--model tiny --device cpu --sequences 8 --prompt 8 --longest 8 --repeats 1 --engines native,generate"
STEP = "--model tiny --device cpu --prompts 2 --samples 2 --new-tokens 4 --steps 3 --no-trl"
TALK = "--model tiny --device cpu --conversations 4 --turns 2 --prompt 8 --observation 4 --engines native"
SMALL = {
    "algorithms.py": ("--only grpo", "grpo_reward"),
    "calls.py": ("--callers 8 --rounds 2 --repeats 1", "crowded_of_single"),
    "conversations.py": (TALK, "native_ms_a_turn"),
    "cycle.py": ("--repeats 1", "cycle_cpu_s"),
    "engine.py": (ENGINE, "native_over_generate"),
    "examples.py": ("tiny --steps 1", "peak_gib"),
    "faults.py": ("--plans 3", "seconds"),
    "grpo_step.py": (STEP, "roll_seconds"),
    "ledger.py": ("--transitions 2000 --repeats 1", "ledger_transitions_per_s"),
    "path.py": ("", "functions"),
    "processes.py": ("--workload tiny --steps 1", "scheduler_s"),
    "products.py": ("--rows 4 --repeats 1", "rows_4_ms"),
    "quick_rewards.py": ("--groups 2 --repeats 1", "number_over_floor"),
    "recovery.py": ("--repeats 1 --runs sharded-local", "sharded-local"),
    "rendering.py": ("--turns 4 --repeats 1", "whole_of_short_4_turns"),
    "sandbox.py": ("--seconds 1", "floor_per_s"),
    "scheduler.py": ("--steps 6 --engines 2", "rlvr_over_barrier"),
    "sharded.py": ("--parts ranks --tokens 256 --repeats 1", "over_one_rank"),
    "simulation.py": ("--engines 2 --steps 2 --speed-engines 10 --speed-samples 1000", "model_requests_per_s"),
    "soak.py": ("--days 0.01", "trained"),
    "train_step.py": ("--device cpu --shape tiny --tokens 256 --repeats 1", "over_plain_loop"),
    "transfer.py": ("--gb 0.05 --repeats 1 --bucket-mb 4", "of_memcpy"),
    "turns.py": ("--steps 2 --host-episodes 32", "host_ms_per_turn"),
    "webshop.py": ("--products 200 --seeds 2", "search_cpu_ms"),
}
NOT_HERE = {"devices.py", "engine_peers.py", "turn_host.py"}
"""The smallest of the first is too large for two cores; the others are processes of `engine.py` and `turns.py`."""


def test_every_benchmark_is_here() -> None:
    scripts = {path.name for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text()}
    assert scripts == SMALL.keys() | NOT_HERE


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_prints_its_figures(name: str, tmp_path: Path) -> None:
    arguments, figure = SMALL[name]
    command = [sys.executable, str(BENCHMARKS / name), *arguments.split(), "--json", "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    printed = json.loads(done.stdout.splitlines()[-1])
    found = list(numbers(printed[figure]))
    assert found
    assert all(math.isfinite(number) and number > 0 for number in found)


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for each in value.values():
            yield from numbers(each)
    else:
        yield float(value)
