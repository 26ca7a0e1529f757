"""Determinism, and what is left of it when runs are killed: a resumed run ends in the bits of an undisturbed one."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from small_runs import EXACT, TINY, Child, Remains, start_roll

from roll.rollout.lifecycle import MOVES


def assert_same_run(run: Remains, undisturbed: Remains) -> None:
    """Weights, optimizer, samples, metrics and the lineage are equal; each sample of a trained group trained once."""
    assert run.checkpoint.step == undisturbed.checkpoint.step
    assert run.samples() == undisturbed.samples()
    assert run.lineage() == undisturbed.lineage()
    assert run.metrics() == undisturbed.metrics()
    assert run.weights() == undisturbed.weights()
    assert run.optimizer() == undisturbed.optimizer()
    assert_lineage_balances(run)


def assert_lineage_balances(run: Remains) -> None:
    rows = [row for step in run.samples().values() for row in step]
    counts = Counter(row["sample"] for row in rows if row["state"] == "trained")
    trained = {id for id, (state, _, _) in run.lineage().items() if state == "trained"}
    assert set(counts) == trained
    assert set(counts.values()) == {1}
    assert {state for state, _, _ in run.lineage().values()} <= {"trained", "dropped", "failed"}
    for id, states in run.lives().items():
        assert all(after in MOVES[before] for before, after in itertools.pairwise(states)), (id, states)
        assert states[-1] == run.lineage()[id][0]
    for group in {id.partition(".")[0] for id in trained}:
        assert {f"{group}.{i}" for i in range(4)} <= trained


def test_two_runs_give_the_same_bits(run_small: Callable[..., Remains], undisturbed: Remains) -> None:
    assert_same_run(run_small(base=EXACT), undisturbed)


@pytest.mark.thorough
def test_the_bits_do_not_depend_on_what_else_runs(run_small: Callable[..., Remains], undisturbed: Remains) -> None:
    """Fewer samples at once in the engine, more graders, and no checkpoints between."""
    run = run_small("rollout.max_running=3", "reward.workers=2", "run.checkpoint_every=0", base=EXACT)
    assert run.samples() == undisturbed.samples()
    assert run.weights() == undisturbed.weights()


@pytest.mark.thorough
def test_another_seed_gives_another_run(run_small: Callable[..., Remains], undisturbed: Remains) -> None:
    run = run_small("seed=1", "train.steps=1", base=EXACT)
    assert run.samples()[1] != undisturbed.samples()[1]


def _start(path: Path) -> Child:
    resume = ["--resume"] if (path / "config.yaml").exists() else []
    return start_roll(["train", TINY, *EXACT, f"run={path}", *resume], path.with_suffix(".out"))


def _kill(child: Child) -> None:
    child.kill()
    deadline = time.monotonic() + 30
    while child.graders():
        assert time.monotonic() < deadline, f"graders {child.graders()} outlived their run"
        time.sleep(0.01)


def _steps_done(path: Path) -> int:
    return len(list(path.glob("samples/step-*.jsonl")))


def test_killed_before_the_first_checkpoint_while_saving_one_and_at_a_random_moment(
    tmp_path: Path, undisturbed: Remains
) -> None:
    path = tmp_path / "run"
    child = _start(path)
    child.wait_for(lambda: _steps_done(path) >= 1)
    _kill(child)
    assert not list(path.glob("checkpoints/step-*"))

    child = _start(path)
    child.wait_for(lambda: list(path.glob("checkpoints/.step-*.tmp-*")), every_s=0)
    _kill(child)

    child = _start(path)
    child.wait_for(lambda: _steps_done(path) >= 5)
    time.sleep(random.Random(7).uniform(0, 0.1))
    _kill(child)

    child = _start(path)
    assert child.end() == 0, child.said
    assert not child.graders()
    assert_same_run(Remains(path), undisturbed)
    assert not list(path.rglob("*.tmp-*"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_killed_at_many_random_moments(tmp_path: Path, undisturbed: Remains, seed: int) -> None:
    path, chance = tmp_path / "run", random.Random(seed)
    for _ in range(6):
        child = _start(path)
        child.process.join(chance.uniform(0.1, 3))
        _kill(child)
    child = _start(path)
    assert child.end() == 0, child.said
    assert_same_run(Remains(path), undisturbed)


def test_a_run_folder_has_one_writer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from roll.cli import main

    path = tmp_path / "run"
    arguments = ["train", TINY, *EXACT, f"run={path}", "train.steps=500"]
    child = start_roll(arguments, tmp_path / "out")
    try:
        child.wait_for(lambda: _steps_done(path) >= 1)
        for option in ("--resume", "--restart"):
            assert main([*arguments, option]) == 2
            message = capfd.readouterr().err
            assert f"{path} is being written by another process (pid {child.pid} on " in message
            assert "write run.dir=OTHER" in message
        done = _steps_done(path)
        child.wait_for(lambda: _steps_done(path) > done)
    finally:
        child.kill()
    assert not list(tmp_path.glob("run.*"))
